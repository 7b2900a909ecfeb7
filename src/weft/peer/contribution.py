"""What this peer has trained and no manifest has counted yet: the carry, and its way into a payload and out of it.

Deltas: local = outer - carry at all times, so the carry needs no memory of its own. It is outer - local; an outer step
moves local along with outer (`rebase`), and a commit that counted the payload sets local to outer.

Who misses rounds because one inner step takes longer than they do hands its carry in as a round begins, and trains on
when that is decided. Whose payload was announced in time and had not arrived when a round was decided offers the same
bytes in the next, so that they go on travelling; where nobody had begun to fetch it, this peer was not slow, and trains
on.

Gradients are no displacement: one that was not counted is averaged into the next, once, weighted by tokens; after a
second miss it is dropped, because it belongs to parameters too long ago.

It does not know rounds' outcomes: it is told whether a commit counted what it last offered.
"""

from collections.abc import Callable

from jaxtyping import Float32
from torch import Tensor

from weft.errors import CheckpointError
from weft.ids import Digest, PeerId, Tokens
from weft.peer.absence import Fate
from weft.peer.replica import Replica
from weft.peer.trainer import Trainer, Work
from weft.sync.reduce import EncodedPart, encode_parts, named

OVERDUE_ROUNDS = 2  # missed in a row: once, a peer was late; twice, it is slow
MAX_TRAVELLING = 64  # rounds for which the same payload is offered: then its holder trains on


class Carry:
    def __init__(self, trainer: Trainer, replica: Replica) -> None:
        self._trainer = trainer
        self._replica = replica
        self._gradient: Float32[Tensor, " num"] | None = None
        self._gradient_tokens = 0
        self._num_missed = 0
        self._num_travelling = 0  # rounds in which the payload was on its way
        self._encoded: tuple[tuple[range, ...], tuple[EncodedPart, ...]] | None = None  # of what is carried
        self.tokens = Tokens(0)  # trained and not counted
        self.num_done = 0  # inner steps made of the present lease
        self.offered: tuple[Digest, ...] | None = None  # the payload announced in the present round
        self.offered_to: PeerId | None = None  # the sponsor, if it was through one
        self.is_restored = False  # from a checkpoint: rounds after it may have counted it

    @property
    def sends_gradient(self) -> bool:
        return self._replica.method.choices.send == "gradient"

    @property
    def is_overdue(self) -> bool:
        """Whether what is carried should be handed in before anything is added: who is slower than the others' rounds
        is ready in time only where it makes no inner steps first, and other bytes would begin to travel anew."""
        is_travelling = 0 < self._num_travelling <= MAX_TRAVELLING
        return not self.sends_gradient and (self._num_missed >= OVERDUE_ROUNDS or is_travelling)

    def add_steps(self, work: Work) -> None:
        """Note inner steps that moved the local parameters."""
        self.tokens = Tokens(self.tokens + work.num_tokens)
        self.num_done += work.num_steps
        self._encoded = None

    def add_gradient(self, gradient: Float32[Tensor, " num"], work: Work) -> None:
        """Note a gradient, averaging it with one that is carried."""
        num_tokens = work.num_tokens
        self.num_done += work.num_steps
        if self._gradient is None:
            self._gradient, self._gradient_tokens = gradient.clone(), num_tokens
        else:
            total = self._gradient_tokens + num_tokens
            # In new memory: others may still be fetching the one before.
            self._gradient = self._gradient.mul(self._gradient_tokens / total).add_(gradient, alpha=num_tokens / total)
            self._gradient_tokens = total
        self.tokens = Tokens(self._gradient_tokens)
        self._encoded = None

    def encode(self, parts: tuple[range, ...]) -> tuple[EncodedPart, ...]:
        """Return the payload, part by part. Nothing changes: what it holds stays here until it is counted.

        It may share the memory of a vector that nobody writes to any more.

        Raises:
            NotFinite: what was trained holds NaN or infinity.
        """
        if self._encoded is None or self._encoded[0] != parts:
            method, trained = self._replica.method, self._trainer.local() if self._gradient is None else self._gradient
            vector = method.contribution(self._replica.outer, trained)
            self._encoded = parts, tuple(map(named, encode_parts(method.codec, vector, parts)))
        return self._encoded[1]

    def settle(self, apply: Callable[[], None], is_counted: bool, fate: Fate = "late") -> None:
        """Run `apply`, which moves the outer parameters, and bring the local ones along.

        Args:
            is_counted: nothing is carried on: the commit holds what was offered, or what was trained is to be dropped.
            fate: of what was offered, where it is not counted.
        """
        self._num_travelling = self._num_travelling + 1 if fate == "travelling" else 0
        self.offered = None
        self.num_done = 0
        self._num_missed += self.tokens > 0 and (self.sends_gradient or fate != "lost")
        if self.sends_gradient:
            apply()
            if is_counted or self._num_missed > 1:
                self.drop()
            self._trainer.set_local(self._replica.outer)
            return
        carry = None
        if self.tokens and not is_counted:
            carry = self._replica.method.contribution(self._replica.outer, self._trainer.local())
        apply()
        local = self._replica.outer if carry is None else self._replica.outer.clone()
        if carry is None:
            self.drop()
        else:
            self._replica.method.rebase(local, self._replica.outer, carry)
        self._trainer.set_local(local)

    def drop(self) -> None:
        """Forget what was trained, because it is counted or can no longer be."""
        self._gradient, self._gradient_tokens, self._num_missed, self._encoded = None, 0, 0, None
        self.tokens = Tokens(0)
        self.is_restored = False

    def vectors(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold; views, not copies."""
        if not self.sends_gradient:
            return {"local": self._trainer.local()}
        return {} if self._gradient is None else {"gradient": self._gradient}

    def counters(self) -> dict[str, int]:
        return {"uncounted_tokens": self.tokens, "num_done": self.num_done, "num_missed": self._num_missed}

    def load(self, vectors: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Take what is the carry's out of a checkpoint's vectors and counters. The replica is loaded before.

        Raises:
            CheckpointError: it is not there.
        """
        try:
            self.tokens = Tokens(counters.pop("uncounted_tokens"))
            self.num_done = counters.pop("num_done")
            self._num_missed = counters.pop("num_missed")
        except KeyError as missing:
            raise CheckpointError(f"the saved state has no {missing}. Resume from another checkpoint.") from None
        self.is_restored = self.tokens > 0
        self._encoded = None
        self._gradient = vectors.pop("gradient", None)
        self._gradient_tokens = 0 if self._gradient is None else self.tokens
        self._trainer.set_local(vectors.pop("local", self._replica.outer))
