"""What became of every inner step that the processes of a swarm made: R2, step by step.

    made ──► carried ──► offered to a round ──► counted by its manifest
                │
                ├──► dropped, which is said
                ├──► saved, and carried by the next process of the same machine
                └──► gone with a process that was killed

Sums of tokens hide a step that is counted twice behind one that is lost. So each step has a name here, and a manifest
counts the steps that its members had offered to its round.

It does not know which of two branches goes on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxtyping import Float32
from torch import Tensor

from scenarios.rules import Place, stakes
from weft.events import WorkDropped
from weft.ids import Digest, PeerId, Round
from weft.peer.state.carry import OUTDATED, Carry
from weft.peer.state.mixing import Met
from weft.sim.world import Life
from weft.sync.merge.reduce import EncodedPart
from weft.sync.records.messages import GroupRecord, Manifest, payload_of
from weft.sync.round.machine import Fate
from weft.sync.round.neighbours import dealt
from weft.training.learner import Work


class Step(NamedTuple):
    """One call of training: an inner step, or several that are counted together or not at all."""

    machine: str
    life: int
    number: int
    tokens: int
    samples: tuple[int, ...]


class Offer(NamedTuple):
    payload: Digest  # as a manifest names it
    steps: tuple[Step, ...]


class Book:
    """The steps of one process.

    Args:
        samples: that it reads, as they are read.
        saved: the steps in the checkpoint from which it may go on.
    """

    def __init__(self, life: Life, samples: list[int], saved: tuple[Step, ...]) -> None:
        self.life = life
        self._samples = samples
        self._num_read = 0  # samples that its steps were made on
        self.found = saved  # and does not carry yet
        self.saved = saved  # in the newest checkpoint of its machine
        self.made: list[Step] = []
        self.carried: list[Step] = []  # oldest first; of a process that was killed, when it was
        self.dropped: list[Step] = []  # carried no more, because they were counted or could not be
        self.offers: dict[Place, Offer] = {}

    def add(self, num_tokens: int) -> None:
        if num_tokens and not self.life.is_dead:
            samples, self._num_read = tuple(self._samples[self._num_read :]), len(self._samples)
            self.made.append(Step(self.life.member.name, self.life.number, len(self.made), num_tokens, samples))
            self.carried.append(self.made[-1])

    def keep(self, num_tokens: int) -> None:
        """Note that so many tokens are still carried: the newest."""
        while tokens(self.carried) > num_tokens:
            self.dropped.append(self.carried.pop(0))
        assert tokens(self.carried) == num_tokens, f"a part of {self.dropped[-1]} is carried"

    def offer(self, parts: Iterable[EncodedPart], num_tokens: int) -> None:
        """Note that so many of the tokens that are carried are brought to the present round: the oldest."""
        rounds = self.life.peer.rounds
        assert rounds is not None
        num = next(num for num in range(len(self.carried) + 1) if tokens(self.carried[:num]) >= num_tokens)
        base, digests = rounds.chain.base, [part.digest for part in parts]
        if base.is_gossip:
            digests = [*dealt(base, self.life.peer.peer, digests[0])]
        payload = payload_of(digests)
        self.offers[base.branch, base.round] = Offer(payload, tuple(self.carried[:num]))

    def told(self, *, is_sure: bool) -> int:
        """Return how many tokens the process said to have dropped.

        Args:
            is_sure: leave out those of which it did not know whether a round had counted them.
        """
        return sum(each.tokens for each in self.life.seen(WorkDropped) if each.reason == OUTDATED or not is_sure)


class WatchedCarry(Carry):
    """A carry whose steps are written into a book."""

    book: Book

    def add_steps(self, work: Work) -> None:
        super().add_steps(work)
        self.book.add(work.num_tokens)

    def add_gradient(self, gradient: Float32[Tensor, " num"], work: Work) -> None:
        super().add_gradient(gradient, work)
        self.book.add(work.num_tokens)

    def encode(self, parts: tuple[range, ...], round: int, *, is_gossip: bool = False) -> tuple[EncodedPart, ...]:
        encoded = super().encode(parts, round, is_gossip=is_gossip)
        self.book.offer(encoded, self.due)
        return encoded

    def settle(
        self,
        apply: Callable[[], None],
        is_counted: bool,
        fate: Fate = "late",
        round: Round | None = None,
        met: Met | None = None,
    ) -> None:
        super().settle(apply, is_counted, fate, round, met)
        self.book.keep(self.tokens)

    def counters(self) -> dict[str, int]:
        self.book.saved = tuple(self.book.carried)
        return super().counters()

    def load(self, vectors: dict[str, Tensor], counters: dict[str, int]) -> None:
        super().load(vectors, counters)
        self.book.carried, self.book.found = list(self.book.found), ()
        assert tokens(self.book.carried) == self.tokens, f"{self.book.life.member.name} goes on with other work"


class Ledger:
    """The books of all processes of a swarm."""

    def __init__(self) -> None:
        self.books: list[Book] = []

    def open(self, life: Life, samples: list[int]) -> None:
        """Follow a process that has not begun.

        Args:
            samples: that it reads, as they are read.
        """
        earlier = [book for book in self.books if book.life.member is life.member]
        self.books.append(Book(life, samples, earlier[-1].saved if earlier else ()))
        carry = life.peer._carry
        carry.__class__ = WatchedCarry
        carry.book = self.books[-1]  # type: ignore[attr-defined]

    def counted(self, manifests: Iterable[Manifest], records: Mapping[Digest, GroupRecord]) -> dict[Step, list[Place]]:
        """Return where each step is counted, of those that are."""
        found: dict[Step, list[Place]] = {}
        for manifest in manifests:
            place = manifest.branch, manifest.round
            for each in manifest.contributions:
                for peer, num_tokens in stakes(each, records):
                    steps = self._offered(peer, place, None if each.group else each.payload)
                    assert num_tokens == tokens(steps), f"{peer[:8]} made {tokens(steps)}, not {num_tokens} tokens"
                    for step in steps:
                        found.setdefault(step, []).append(place)
        return found

    def _offered(self, peer: PeerId, place: Place, payload: Digest | None) -> tuple[Step, ...]:
        """Return the steps that a peer brought to a round. Two processes of it that train on one lease bring the same
        bytes: the steps of the later one.

        Args:
            payload: as the manifest names it; None: it was brought through an aggregator.
        """
        offers = [book.offers[place] for book in self.books if book.life.member.id == peer and place in book.offers]
        return [offer.steps for offer in offers if payload in (None, offer.payload)][-1]

    def check(self, counted: Mapping[Step, list[Place]]) -> None:
        """Assert that every step which no manifest counts is carried, was said to be dropped, or is gone with a process
        that was killed. Who is back makes steps once more that were counted, as it hears later: those are dropped.
        Samples can be leased once more, too, after their step was dropped: what was said of that still holds. What a
        process that was killed had dropped and not saved, the next one carries again, whatever the former said."""
        known = {(step.machine, sample) for step in counted for sample in step.samples}
        for book in self.books:
            process = f"{book.life.member.name}{book.life.number}"
            assert tokens(book.made) == book.life.trained_tokens
            if not book.life.is_dead and book.life.task.exception() is None:
                assert not book.found, f"{process} did not go on with what was saved"
                assert set(book.carried) <= set(book.saved), f"{process} did not save what it carried"
            again = set(book.saved) if book.life.is_dead else set()
            uncounted = [step for step in book.dropped if step not in counted and step not in again]
            lost = tokens(
                step for step in uncounted if any((step.machine, sample) not in known for sample in step.samples)
            )
            assert lost <= book.told(is_sure=False), f"{process} dropped {lost} tokens in silence"
            assert tokens(book.dropped) >= book.told(is_sure=False)
            if book.life.is_dead:
                continue
            assert tokens(uncounted) >= book.told(is_sure=True), f"{process} said that it dropped work which is counted"


def tokens(steps: Iterable[Step]) -> int:
    return sum(step.tokens for step in steps)
