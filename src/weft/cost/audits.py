"""What members take to audit each other, added up: seconds of a round, bytes, memory and disk (docs/audits.md).

    a = min(r t, n - 1)          audits that a contribution can expect, and a part: rate r, n members, t = `times` in
                                 the first rounds and 1 later
    hashing   (H / e + 1) 4 (1 + m) N h      of H training steps every e-th state, and the first: N parameters and m
                                             moments of each, h seconds a byte
    kept      b 4 (1 + m) N w    b states inside a lease, w seconds a byte: a worker begins at the last of them.
                                 b + 1 = sqrt(r H s / (4 (1 + m) N (h + w))), or so, where a step takes s seconds
    worker    a (H / (b + 1) + e) / 2    training steps made again: from what is kept to those that were drawn
    auditor   a e                training steps made
    merging   a                  payloads decoded and added: an n-th of each of n
    fetched   a 4 N (m + 2 + c)  the state before, the parameters after the lease, and what a codec has left (c = 1, or
                                 0): of AdamW 16 or 20 bytes a parameter. Where machines round differently the state
                                 after it, too: 1 + m more. Who had no lease itself fetches the parameters before, too
              a (n - 1) / n      payloads

Memory of a peer at most, in vectors of 4 N bytes, with the state before and after a step 1 + m each:

    shown     2 (2 (1 + m) + 2 + c)    for two audits at a time: both states, what the lease began and ended with; one
                                       more for the gradient in exact numbers. Small ones are kept for all who asked in
                                       the last twenty rounds, up to 512 MiB
    looked    (d + 2) 3 (1 + m)        the state before, its own after and the other's: of d works that are drawn, and
                                       of two at a time that one member doubts (two more of each further member).
                                       d = min(r t, n - 1), and one at least
    lent      2 (1 + m) + 1            where the trainer makes other steps, one at a time: its own state, a kept one
    measured  5                        how far two vectors lie apart, in float64
    merged    a payload

Each peer is worker and auditor of as many in the mean. Where all share a machine, what one does is taken from all.
Where each has its own, a round waits for who has most to do again, or goes on without it. It is audited at all with
the chance q, and then any part of what lies between two kept states is as likely as another:

    q = 1 - (1 - a / (n - 1))^(n - 1)
    waited    1 - (1 - (1 - q)^(n + 1)) / ((n + 1) q)     of H / (b + 1) steps, the mean of the largest of n: a / 2
                                                          where n is one
              a                                           at most: who is late misses the rest of one round

So a round waits for up to a H / (b + 1) steps, and states take b times what one takes: their sum is least with the b
above. It is found from what a machine takes, and is at most `MAX_BETWEEN`: with seven a worker makes a sixteenth of a
lease again.

A step takes about 6 N tokens / C seconds at C FLOP/s, so hashing its state takes 2 C h / tokens of it with AdamW,
whatever N: a twentieth of 2048 tokens at 100 GFLOP/s, and many times the step on a GPU. What copying from there takes
is not counted.
"""

from dataclasses import dataclass
from math import ceil, sqrt
from typing import NamedTuple

from weft.cost.training import Traffic

# Of a byte of a state, where nothing is timed: one thread of a server that others used, too. Idle cores take less.
HASH_S = 6e-10
WRITE_S = 7e-10  # into the system's cache, not to the disk
FLOAT_NBYTES = 4
MAX_BETWEEN = 7  # states that are kept inside a lease: disk for a few of the newest leases


class Kept(NamedTuple):
    """For how long something is kept: so many rounds, and so many seconds, both at least."""

    rounds: int
    seconds: float

    def num(self, round_s: float) -> int:
        """Return of how many rounds of so many seconds it is there, with the one that goes on."""
        return max(self.rounds, int(self.seconds / round_s)) + 1


# Of steps that a peer shows its auditors at a time; where all of them are small, more, up to so many bytes.
MAX_SHOWN = 2
MAX_SHOWN_NBYTES = 512 << 20
MAX_DOUBTING = 2  # audits at a time because of what one member doubts
LEASE_ROUNDS = 20  # at least, for which a peer can be asked for what its leases came to
NUM_STATES = 3  # that an audit holds: before the steps, after them as this machine made them, and as the other has it
ROUNDED = 1  # one more, and parameters, while one audit looks how far rounding leads
MEASURED = 5  # vectors: two in float64 and what they are made of


@dataclass(frozen=True, kw_only=True)
class Customs:
    """What all members hold to.

    Args:
        times: as often newcomers are audited, in their first `num_new` rounds.
        leases, parts: for how long what they may ask for is kept.
        between: for how long states inside leases are.
    """

    times: float
    num_new: int
    leases: Kept
    parts: Kept
    between: Kept


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What is audited.

    Args:
        customs: of all runs. `rate`, `trace_every`: as of `[trust]`.
        num_moments: vectors that the optimizer of training steps has.
        has_error: what a codec has left is a vector, too.
        num_steps: of a lease.
        payload_nbytes: of one whole contribution. `merged_nbytes`: of the result of one part.
        has_gradient: as of `Holds`.
    """

    customs: Customs
    rate: float
    trace_every: int
    num_members: int
    num_rounds: int
    num_parameters: int
    num_moments: int
    has_error: bool
    num_steps: int
    payload_nbytes: int
    merged_nbytes: int
    has_gradient: bool = False

    @property
    def every(self) -> int:
        """Training steps that one audit does again."""
        return min(self.trace_every, self.num_steps)

    @property
    def num_audits(self) -> float:
        """Return how many audits a contribution can expect in the mean of all rounds."""
        first = min(self.customs.num_new, self.num_rounds) / self.num_rounds
        of_new, later = (most_audits(self.rate, times, self.num_members) for times in (self.customs.times, 1.0))
        return first * of_new + (1 - first) * later

    @property
    def holds(self) -> "Holds":
        return Holds(
            num_parameters=self.num_parameters,
            num_moments=self.num_moments,
            has_error=self.has_error,
            payload_nbytes=self.payload_nbytes,
            has_gradient=self.has_gradient,
            num_audits=most_audits(self.rate, self.customs.times, self.num_members),
        )

    @property
    def state_nbytes(self) -> int:
        return state_nbytes(self.num_parameters, self.num_moments)

    @property
    def end_nbytes(self) -> int:
        return end_nbytes(self.num_parameters, self.has_error)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a member is.

    Args:
        step_s: of a training step. `hash_s`, `write_s`: of a byte. `merge_s`: of decoding and adding one payload.
        crowding: members per core that serves them: above 1 where they share a machine.
    """

    step_s: float
    hash_s: float
    write_s: float
    merge_s: float
    crowding: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AuditCost:
    """What audits take of a mean peer, in a mean round.

    Args:
        customs: by which it is reckoned.
        num_audits: of a contribution; each peer makes as many.
        hash_s: of its states. `keep_s`: of those inside a lease.
        again_s: of training steps and merging, its own and others'.
        waited_s: what a round waits for the one that has most to do again, `again_s` in it.
        traffic: on average.
        step_nbytes: that one audit of training steps fetches: where machines come to the same, and where not.
        part_nbytes: that one audit of a part fetches.
        memory_nbytes: on the host at most, as of `Holds`.
        lease_nbytes, between_nbytes, payloads_nbytes: of what it keeps on its disk of each round.
    """

    customs: Customs
    num_audits: float
    hash_s: float
    keep_s: float
    again_s: float
    waited_s: float
    traffic: Traffic
    step_nbytes: tuple[int, int]
    part_nbytes: int
    memory_nbytes: int
    lease_nbytes: int
    between_nbytes: int
    payloads_nbytes: int

    def disk_nbytes(self, round_s: float) -> int:
        """Return the bytes on the disk, of as many rounds as others may ask for.

        Args:
            round_s: of a whole round.
        """
        customs = self.customs
        nbytes = customs.leases.num(round_s) * self.lease_nbytes + customs.parts.num(round_s) * self.payloads_nbytes
        return nbytes + customs.between.num(round_s) * self.between_nbytes

    @property
    def round_s(self) -> float:
        """Return how much longer a round takes."""
        return self.hash_s + self.keep_s + self.waited_s


def cost_of(audited: Audited, speed: Speed) -> AuditCost:
    """Return what audits take in a round."""
    num, every, num_audits = audited.num_steps, audited.every, audited.num_audits
    named = -(-num // every) + 1
    state_s = audited.state_nbytes * (speed.hash_s + speed.write_s)
    inside = num_between(num, speed.step_s, state_s, audited.rate)
    span = min(num, spacing(num, inside, audited.trace_every))  # training steps from one state that is kept to the next
    inside = -(-num // span) - 1
    passed = num_audits * (span / 2 + 1.5 * every)  # as worker and as auditor, in training steps
    longest = span * min(longest_part(num_audits, audited.num_members), num_audits) + 1.5 * num_audits * every
    merge_s = num_audits * speed.merge_s
    again_s, longest_s = passed * speed.step_s + merge_s, longest * speed.step_s + merge_s
    least, part = step_nbytes(audited), part_nbytes(audited)
    mean = round(num_audits * (least + part))
    return AuditCost(
        customs=audited.customs,
        num_audits=num_audits,
        hash_s=speed.crowding * named * audited.state_nbytes * speed.hash_s,
        keep_s=speed.crowding * inside * audited.state_nbytes * speed.write_s,
        again_s=again_s,
        waited_s=max(again_s, longest_s / speed.crowding),  # who works alone has the cores to itself
        traffic=Traffic(mean, mean),
        step_nbytes=(least, least + audited.state_nbytes),
        part_nbytes=part,
        memory_nbytes=audited.holds.nbytes,
        lease_nbytes=audited.state_nbytes + audited.end_nbytes,
        between_nbytes=inside * audited.state_nbytes,
        # its own, what was brought to its part, and the result of another's
        payloads_nbytes=2 * audited.payload_nbytes + audited.merged_nbytes,
    )


def num_between(num_steps: int, step_s: float, state_s: float, rate: float) -> int:
    """Return how many states inside a lease are kept, so that writing them and what a round waits for take the least.

    Args:
        num_steps: of the lease. `step_s`: of each. `state_s`: of writing a state.
        rate: the chance that somebody audits it.
    """
    most = min(MAX_BETWEEN, num_steps - 1)
    if state_s <= 0:
        return most
    return max(0, min(most, round(sqrt(rate * num_steps * step_s / state_s)) - 1))


def spacing(num_steps: int, num: int, every: int) -> int:
    """Return after how many steps each of so many states is kept: all are named, which every `every`-th is."""
    apart = -(-num_steps // (num + 1))
    return -(-apart // every) * every


def longest_part(num_audits: float, num_members: int) -> float:
    """Return what part of what lies between two kept states that member makes again which has most of it, of all who
    were drawn in a round."""
    if num_members < 2 or not num_audits:
        return 0.0
    missed = (1 - num_audits / (num_members - 1)) ** (num_members - 1)
    return 1 - (1 - missed ** (num_members + 1)) / ((num_members + 1) * (1 - missed))


def step_nbytes(audited: Audited) -> int:
    """Return the bytes that an audit of training steps fetches where both machines come to the same: what the lease
    began at, its auditor's own lease began at, too."""
    return audited.state_nbytes + audited.end_nbytes


def part_nbytes(audited: Audited) -> int:
    """Return the bytes that an audit of a part fetches: what the others have of it."""
    return audited.payload_nbytes * (audited.num_members - 1) // audited.num_members


def state_nbytes(num_parameters: int, num_moments: int) -> int:
    """Return the bytes of a state: parameters and moments."""
    return FLOAT_NBYTES * num_parameters * (1 + num_moments)


def end_nbytes(num_parameters: int, has_error: bool) -> int:
    """Return the bytes of what a lease ends with: parameters, and what a codec had left."""
    return FLOAT_NBYTES * num_parameters * (1 + has_error)


@dataclass(frozen=True, kw_only=True)
class Holds:
    """What decides how much memory audits take of a peer.

    Args:
        num_moments, has_error, payload_nbytes: as of `Audited`.
        has_gradient: of a step that it shows a peer signs the gradient, too: in exact numbers.
        num_audits: that a contribution can expect in a round, and that each makes, as of newcomers.
    """

    num_parameters: int
    num_moments: int
    has_error: bool
    payload_nbytes: int
    has_gradient: bool
    num_audits: float

    @property
    def shown_nbytes(self) -> int:
        """Return the bytes of what it shows to those who audit it."""
        vector = FLOAT_NBYTES * self.num_parameters
        end = end_nbytes(self.num_parameters, self.has_error)
        each = 2 * state_nbytes(self.num_parameters, self.num_moments) + vector + end + self.has_gradient * vector
        asked = ceil(LEASE_ROUNDS * self.num_audits)  # for as long as it may be asked for
        return max(MAX_SHOWN, min(asked, ceil(MAX_SHOWN_NBYTES / each))) * each

    @property
    def looked_nbytes(self) -> int:
        """Return the bytes of what it looks at."""
        state, num_drawn = state_nbytes(self.num_parameters, self.num_moments), max(1, ceil(self.num_audits))
        num_states = (num_drawn + MAX_DOUBTING) * NUM_STATES + ROUNDED
        return num_states * state + (ROUNDED + MEASURED) * FLOAT_NBYTES * self.num_parameters

    @property
    def lent_nbytes(self) -> int:
        """Return the bytes of what is put aside, and read, while its trainer makes other steps than its own."""
        return 2 * state_nbytes(self.num_parameters, self.num_moments) + FLOAT_NBYTES * self.num_parameters

    @property
    def nbytes(self) -> int:
        """Return the bytes on the host at most."""
        return self.shown_nbytes + self.looked_nbytes + self.lent_nbytes + self.payload_nbytes


def most_audits(rate: float, times: float, num_members: int) -> float:
    """Return how many audits a contribution can expect in a round in which all are audited `times` as often."""
    return min(rate * times, num_members - 1.0)
