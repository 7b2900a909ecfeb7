"""What this peer has trained and no manifest has counted yet: the carry, and its way into a payload and out of it.

Deltas: local = outer - carry at all times, so the carry needs no memory of its own. It is outer - local; an outer step
moves local along with outer, and a commit that counted the payload sets local to outer.

Who misses rounds because one inner step takes longer than they do hands its carry in as a round begins, and trains on
when that is decided. Whose payload was announced in time and had not arrived when a round was decided offers the same
bytes in the next, so that they go on travelling; where nobody had begun to fetch it, this peer was not slow, and trains
on.

Where no majority is left, a peer trains on ahead of its leases (`contribution.Ahead`). A mark is set where the
leased work ends:

    outer ──── due, offered ────► mark ──── ahead, kept ────► local

The steps that were made ahead cover the leases that follow: the mark moves on by their share, they are due, and only
the rest of a lease is trained. So no more is claimed than is leased, and all that was trained is counted once.

Gradients are no displacement: one that was not counted is averaged into the next, once, weighted by tokens; after a
second miss it is dropped, because it belongs to parameters too long ago.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor, zeros

from weft.codec.config import CodecConfig, RandomKConfig
from weft.errors import CheckpointError
from weft.ids import Digest, PeerId, Round, Tokens
from weft.peer.state.mixing import Met, Mixing
from weft.peer.state.replica import Replica
from weft.sync.merge.reduce import EncodedPart, encode_payload, named
from weft.sync.merge.sharded import SpreadVector, alike
from weft.sync.records.messages import Counted, payload_of
from weft.sync.round.machine import Fate
from weft.training.learner import Learner, Work

OVERDUE_ROUNDS = 2  # missed in a row: once, a peer was late; twice, it is slow
# Why work is dropped.
FORGOTTEN = (
    "a round that this peer did not follow to its end may have counted them, and none may count them twice. That is "
    "usual after a restart, or after a time apart from the others"
)
MADE_TWICE = "a round has counted what this peer offered on the same samples before it was started again"
FROM_FALSE_STATE = "they were trained from another state than the run's"
OUTDATED = "a gradient that two rounds did not count is too old"
MAX_TRAVELLING = 64  # rounds for which the same payload is offered: then its holder trains on


_KEPT = ("local", "mark", "error", "gradient")  # vectors of a checkpoint


@dataclass(frozen=True)
class _Encoded:
    """A payload, and what its codec leaves once it is counted; None: nothing is kept of that."""

    parts: tuple[range, ...]
    round: int
    variant: tuple[int, bool, CodecConfig]  # of what depends on the round, whether it is for neighbours, how encoded
    payload: tuple[EncodedPart, ...]
    left: Float32[Tensor, " num"] | None  # where what is left stays in the local parameters: what is sent


class Carry:
    def __init__(self, trainer: Learner, replica: Replica) -> None:
        self._trainer = trainer
        self._replica = replica
        self._gradient: Float32[Tensor, " num"] | None = None
        self._gradient_tokens = 0
        self._num_missed = 0
        self._num_travelling = 0  # rounds in which the payload was on its way
        self._encoded: _Encoded | None = None  # of what is carried
        self.mixing = None if replica.config.method.graph is None else Mixing(replica)
        self._error: Float32[Tensor, " num"] | None = None  # what codecs left of all that was counted
        self._sent: Float32[Tensor, " num"] | None = None  # of the round that is being settled
        self.tokens = Tokens(0)  # trained and not counted
        self.ahead = Tokens(0)  # of those, beyond all leases
        self._mark: Float32[Tensor, " num"] | None = None  # where the leased work ends; None: nothing is beyond it
        self.num_done = 0  # inner steps made of the present lease
        self.offered: tuple[Digest, ...] | None = None  # the payload announced in the present round
        self.offered_to: PeerId | None = None  # the aggregator, if it was through one
        self.is_restored = False  # from a checkpoint: rounds after it may have counted it
        self.is_held = False  # others look at what was offered, and count those very bytes

    @property
    def sends_gradient(self) -> bool:
        return self._replica.method.choices.sends_gradient

    @property
    def is_overdue(self) -> bool:
        """Whether what is carried should be handed in before anything is added: who is slower than the others' rounds
        is ready in time only where it makes no inner steps first, and other bytes would begin to travel anew."""
        is_travelling = 0 < self._num_travelling <= MAX_TRAVELLING
        return not (self.sends_gradient or self._keeps_lease) and (self._num_missed >= OVERDUE_ROUNDS or is_travelling)

    @property
    def _keeps_lease(self) -> bool:
        """Whether rounds that do not count this peer leave it at work on the lease that it has."""
        return self._replica.method.choices.wait == "ready"

    @property
    def due(self) -> Tokens:
        """What leases cover of what is carried: as much as may be claimed."""
        return Tokens(self.tokens - self.ahead)

    def go_ahead(self) -> None:
        """Let the inner steps that follow be ahead of all leases."""
        if self._mark is None:
            self._mark = self._trainer.local().clone()

    def cover(self, num_steps: int, tokens_per_step: int) -> None:
        """Let what was made ahead be inner steps of a lease that has `num_steps` to be made, as far as it goes."""
        if self._mark is None:
            return
        num_made = max(0, min(num_steps, -(-self.ahead // tokens_per_step)))
        tokens = min(self.ahead, num_made * tokens_per_step)
        if tokens == self.ahead:
            self._mark = None
        elif tokens:
            self._mark = self._mark.lerp(self._trainer.local(), tokens / self.ahead)
        self.ahead = Tokens(self.ahead - tokens)
        self.num_done += num_made
        self._encoded = None

    def make_empty_again(self) -> None:
        """Let steps of which nothing came be made again: of a stage whose peer paused before a micro-batch had come."""
        if not self.tokens:
            self.num_done = 0

    def add_steps(self, work: Work) -> None:
        """Note inner steps that moved the local parameters."""
        self.tokens = Tokens(self.tokens + work.num_tokens)
        if self._mark is not None:
            self.ahead = Tokens(self.ahead + work.num_tokens)
            return
        self.num_done += work.num_steps
        self._encoded = None

    def add_gradient(self, gradient: Float32[Tensor, " num"], work: Work) -> None:
        """Note a gradient, averaging it with one that is carried."""
        num_tokens = work.num_tokens
        self.num_done += work.num_steps
        if not num_tokens:
            return
        if self._gradient is None:
            self._gradient, self._gradient_tokens = gradient.clone(), num_tokens
        else:
            total = self._gradient_tokens + num_tokens
            # In new memory: others may still be fetching the one before.
            self._gradient = self._gradient.mul(self._gradient_tokens / total).add_(gradient, alpha=num_tokens / total)
            self._gradient_tokens = total
        self.tokens = Tokens(self._gradient_tokens)
        self._encoded = None

    def encode(self, parts: tuple[range, ...], round: int, *, is_gossip: bool = False) -> tuple[EncodedPart, ...]:
        """Return the payload for a round, part by part. Nothing changes: what it holds stays here until it is counted.

        It may share the memory of a vector that nobody writes to any more.

        Args:
            is_gossip: it is for this peer's neighbours, whole.

        Raises:
            NotFinite: what was trained holds NaN or infinity.
        """
        method, scope = self._replica.method, self._replica.scope
        # Other bytes in another round.
        codec = self._replica.config.method.codec
        is_new = isinstance(codec, RandomKConfig) or not method.basis.is_orthonormal
        variant = round if is_new else scope.fragment(round), is_gossip, codec
        known = self._encoded
        if known is not None and self.is_held and (known.parts, known.variant[1:]) == (parts, variant[1:]):
            return known.payload
        if known is None or (known.parts, known.variant) != (parts, variant):
            trained = self._leased() if self._gradient is None else self._gradient
            if is_gossip and self.mixing is not None:
                self._encoded = _Encoded(parts, round, variant, (self.mixing.payload(trained, round),), None)
                return self._encoded.payload
            if self.mixing is not None:
                trained = self.mixing.alone(trained)
            # A learner that is spread lends a copy, and there is no room for another.
            is_lent = isinstance(trained, SpreadVector) and self._mark is None and self._gradient is None
            delta = method.delta(self._replica.outer, trained, trained if is_lent else None)
            state = self._replica.vectors()
            encoded, left = encode_payload(method, scope, state, delta, self._error, parts, round)
            if left is not None and method.choices.error == "local":
                left = delta - left
            known = self._encoded = _Encoded(parts, round, variant, tuple(map(named, encoded)), left)
        return known.payload

    @property
    def error(self) -> Float32[Tensor, " num"] | None:
        """What codecs left of all that was counted."""
        return self._error

    @property
    def left(self) -> Float32[Tensor, " num"] | None:
        """What `error` is once the payload that was encoded last is counted."""
        return None if self._encoded is None else self._encoded.left

    def forget_error(self) -> None:
        self._error = None

    def forget_encoded(self) -> None:
        """Encode what is carried anew for the next round, though it has not changed."""
        self._encoded = None

    def offer(self, parts: tuple[Digest, ...] | None, through: PeerId | None = None) -> None:
        """Note what is announced in the present round, and through whom; None: nothing."""
        self.offered, self.offered_to = parts, through

    def take_back(self) -> None:
        """Note that the round in which it was announced counts for nothing here: another state is taken over."""
        self.offered = None

    def is_as_offered(self, counted: Counted | None) -> bool:
        """Return whether what a manifest counts of this peer, if anything, is what this process offered."""
        if counted is None:
            return True
        return self.offered is not None and payload_of(self.offered) == counted.payload

    def made_twice(self, counted: Counted | None) -> Tokens:
        """Return how much of what is due is dropped as a manifest counts an earlier process of this peer instead."""
        if counted is None or counted.group is not None or self.is_as_offered(counted):
            return Tokens(0)
        return Tokens(max(self.due - (counted.tokens if self.is_restored else 0), 0))

    def settle(
        self,
        apply: Callable[[], None],
        is_counted: bool,
        fate: Fate = "late",
        round: Round | None = None,
        met: Met | None = None,
    ) -> None:
        """Run `apply`, which moves the outer parameters, and bring the local ones along.

        Args:
            round: whose step `apply` makes; None: it takes over another state.
            is_counted: the commit holds what was offered, or that is to be dropped. Where this process has offered
                nothing, one before it did: what that one offered is trained on the same lease, and may hold all of what
                was restored, which is dropped. Or the commit is heard of a second time.
            fate: of what was offered, where it is not counted.
            met: whom this peer meets, where the round is a gossip round.
        """
        self._num_travelling = self._num_travelling + 1 if fate == "travelling" and self.due else 0
        if is_counted and self.offered is None:
            if self.is_restored:
                self.ahead, self._mark = Tokens(0), None
            if self.due:
                self._error = None
        elif is_counted and self._encoded is not None:
            self._keep_error(self._encoded)
        self.offered = None
        if round is not None:  # else a round that comes by again may count it
            self.offered_to = None
        self.num_done = self.num_done if self._keeps_lease and not is_counted else 0
        self._num_missed += self.due > 0 and (self.sends_gradient or fate != "lost")
        if self.sends_gradient:
            apply()
            if is_counted or self._num_missed > 1:
                self._drop()
            self._trainer.set_local(self._replica.outer)
            return
        if self.mixing is not None:
            self._mix(self.mixing, apply, is_counted, round, met)
            return
        if self._replica.method.choices.is_streaming:
            self._stream(apply, is_counted, round)
            return
        ahead = None if self._mark is None else self._mark - self._trainer.local()
        due = None
        if self.due and not is_counted:
            due = self._replica.method.delta(self._replica.outer, self._leased())
        apply()
        if is_counted or not self.tokens:
            self._drop()
        local = self._replica.outer if due is None and ahead is None else self._replica.outer.clone()
        if due is not None:
            local.sub_(due)
        if ahead is not None:
            self._mark, local = local, local - ahead
        self._trainer.set_local(local)
        self._trainer.set_center(self._replica.outer)

    def _mix(
        self, mixing: Mixing, apply: Callable[[], None], is_counted: bool, round: Round | None, met: Met | None
    ) -> None:
        """The same where members exchange with neighbours: what was made ahead keeps its distance."""
        leased, local, outer = self._leased(), self._trainer.local(), self._replica.outer
        choices = self._replica.config.method  # of the round: what its manifest amends holds after it
        before, encoded = outer.clone() if round is None else None, self._encoded
        apply()
        if before is not None:  # another state
            position = leased + (outer - before)
            mixing.lose(position)
        elif met is not None:
            is_sent = is_counted and met.is_known
            sent = encoded.payload[0].encoded if encoded is not None and is_sent else None
            position = mixing.meet(leased, sent, met, Round(round or 0), choices)
        else:
            head = self._replica.head
            is_mean = head is None or head.has_result  # where a branch opens, nothing is made
            if is_mean:
                mixing.note_distance(leased)
            is_mine = is_counted and is_mean
            position = outer.clone() if is_mine else leased
            mixing.begin(is_mine)
        if met is None:
            self._encoded = None  # it is told by its distance to the outer parameters, which have moved
        if is_counted or not self.tokens:
            self._drop()
        if self._mark is not None:
            self._mark, position = position, position + (local - leased)
        self._trainer.set_local(position)

    def _stream(self, apply: Callable[[], None], is_counted: bool, round: Round | None) -> None:
        """The same where a round is of a fragment: the rest of the local parameters stays where it is.

        counted        local = mix local + (1 - mix) outer      Douillard et al., 2501.18512, equation 4;
                       what is ahead of the overlap, because no majority was in sight, keeps its distance
        not counted    local follows outer, and keeps its distance
        counted, and what was not sent stays in local: it keeps its distance but for what was sent
        """
        outer, mix, scope = self._replica.outer, self._replica.method.choices.mix, self._replica.scope
        mine = [(self._trainer.local(), self._overlapped())] + (
            [] if self._mark is None else [(self._mark, self._mark)]
        )
        before = outer.clone() if round is None else scope.take(outer, round).clone()
        apply()
        if round is None:
            for vector, _ in mine:
                vector.add_(outer - before)
        else:
            after = scope.take(outer, round)
            sent = self._sent if is_counted else None
            for vector, overlapped in mine:
                held = scope.take(vector, round)
                if sent is not None:
                    held = held + (after - before) + sent
                elif is_counted:
                    within = scope.take(overlapped, round)
                    held = mix * within + (1 - mix) * after + (held - within)
                else:
                    held = held + (after - before)
                scope.put(vector, round, held)
        self._sent = None
        if is_counted or not self.tokens:
            self._drop()
        self._trainer.set_local(mine[0][0])
        self._trainer.set_center(outer)

    def _overlapped(self) -> Float32[Tensor, " num"]:
        """Return the local parameters where the steps end that the method makes while a round is decided."""
        local, config = self._trainer.local(), self._replica.config
        num_within = config.method.overlap * config.settings.tokens_per_step
        if self._mark is None or self.ahead <= num_within:
            return local
        return self._mark.lerp(local, num_within / self.ahead)

    def _keep_error(self, encoded: _Encoded) -> None:
        """Keep what a codec left of a payload that is counted."""
        if self._replica.method.choices.error == "local":
            self._sent = encoded.left
            return
        if encoded.left is None or self._replica.scope.fragments == 1:
            self._error = encoded.left
            return
        if self._error is None:
            self._error = zeros(self._replica.scope.num)
        self._replica.scope.put(self._error, encoded.round, encoded.left)

    def _leased(self) -> Float32[Tensor, " num"]:
        """Return the local parameters where the leased work ends."""
        return self._trainer.local() if self._mark is None else self._mark

    def give_up(self) -> None:
        """Forget what is carried: others have counted some of it."""
        self._drop()
        self._trainer.set_local(self._replica.outer)

    def start_over(self) -> None:
        """Forget all that was trained, also what was made ahead: it began from another state than the run's."""
        self.ahead, self._mark, self._error, self._sent = Tokens(0), None, None, None
        self.offered = self.offered_to = None
        self.num_done = 0
        self.give_up()
        self._trainer.set_center(self._replica.outer)

    def _drop(self) -> None:
        """Forget what is due, because it is counted or can no longer be."""
        self._gradient, self._gradient_tokens, self._encoded = None, 0, None
        self._num_missed = self._num_travelling = 0
        self.tokens = self.ahead
        self.is_restored = False

    def vectors(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold; views, not copies."""
        if not self.sends_gradient:
            vectors = {"local": self._trainer.local(), "mark": self._mark, "error": self._error}
        else:
            vectors = {"gradient": self._gradient, "error": self._error}
        return {name: vector for name, vector in vectors.items() if vector is not None}

    def counters(self) -> dict[str, int]:
        counters = {"uncounted_tokens": self.tokens, "num_done": self.num_done, "num_missed": self._num_missed}
        return counters if self._mark is None else {**counters, "ahead_tokens": self.ahead}

    def load(self, vectors: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Take what is the carry's out of a checkpoint's vectors and counters. The replica is loaded before.

        Raises:
            CheckpointError: it is not there.
        """
        try:
            self.tokens = Tokens(counters.pop("uncounted_tokens"))
            num_done = counters.pop("num_done")
            self.num_done = num_done if self.tokens else 0  # of nothing, as where no micro-batch came: made again
            self._num_missed = counters.pop("num_missed")
        except KeyError as missing:
            raise CheckpointError(f"the saved state has no {missing}. Resume from another checkpoint.") from None
        kept = {name: alike(vectors.pop(name), self._replica.outer) for name in _KEPT if name in vectors}
        self.ahead, self._mark = Tokens(counters.pop("ahead_tokens", 0)), kept.get("mark")
        if self.ahead and self._mark is None:
            raise CheckpointError("the saved state has no mark. Resume from another checkpoint.")
        self.is_restored = self.tokens > 0
        self._encoded, self._error = None, kept.get("error")
        self._gradient = kept.get("gradient")
        self._gradient_tokens = 0 if self._gradient is None else self.tokens
        local = kept.get("local", self._replica.outer)
        if self.mixing is not None:
            self.mixing.lose(local if self._mark is None else self._mark)
        self._trainer.set_local(local)
        self._trainer.set_center(self._replica.outer)
