"""What this peer has trained and no manifest has counted yet: the carry, and its way into a payload and out of it.

Deltas: local = outer - carry at all times, so the carry needs no memory of its own. It is outer - local; an outer step
moves local along with outer (`rebase`), and a commit that counted the payload sets local to outer.

Gradients are no displacement: one that was not counted is averaged into the next, once, weighted by tokens; after a
second miss it is dropped, because it belongs to parameters too long ago.

It does not know rounds' outcomes: it is told whether a commit counted what it last offered.
"""

from collections.abc import Callable

from jaxtyping import Float32
from torch import Tensor

from weft.ids import Digest, Tokens
from weft.peer.replica import Replica
from weft.peer.trainer import Trainer
from weft.sync.method import Method
from weft.sync.reduce import encode_parts
from weft.wire import Buffer


class Carry:
    def __init__(self, method: Method, trainer: Trainer, replica: Replica) -> None:
        self._method = method
        self._trainer = trainer
        self._replica = replica
        self._gradient: Float32[Tensor, " num"] | None = None
        self._gradient_tokens = 0
        self._num_missed = 0
        self.tokens = Tokens(0)  # trained and not counted
        self.offered: tuple[Digest, ...] | None = None  # the payload announced last

    @property
    def sends_gradient(self) -> bool:
        return self._method.choices.send == "gradient"

    def add_steps(self, num_tokens: int) -> None:
        """Note inner steps that moved the local parameters."""
        self.tokens = Tokens(self.tokens + num_tokens)

    def add_gradient(self, gradient: Float32[Tensor, " num"], num_tokens: int) -> None:
        """Note a gradient over `num_tokens`, averaging it with one that is carried."""
        if self._gradient is None:
            self._gradient, self._gradient_tokens = gradient.clone(), num_tokens
        else:
            total = self._gradient_tokens + num_tokens
            self._gradient.mul_(self._gradient_tokens / total).add_(gradient, alpha=num_tokens / total)
            self._gradient_tokens = total
        self.tokens = Tokens(self._gradient_tokens)

    def encode(self, parts: tuple[range, ...]) -> tuple[Buffer, ...]:
        """Return the payload, part by part. Nothing changes: what it holds stays here until it is counted.

        Raises:
            NotFinite: what was trained holds NaN or infinity.
        """
        trained = self._gradient if self._gradient is not None else self._trainer.local()
        vector = self._method.contribution(self._replica.outer, trained)
        return tuple(bytes(part) for part in encode_parts(self._method.codec, vector, parts))

    def settle(self, apply: Callable[[], None], is_counted: bool) -> None:
        """Run `apply`, which moves the outer parameters, and bring the local ones along.

        Args:
            is_counted: the commit holds what was offered, so nothing is carried on.
        """
        if self.sends_gradient:
            apply()
            self._num_missed = 0 if is_counted else self._num_missed + 1
            if is_counted or self._num_missed > 1:
                self._gradient, self._gradient_tokens, self.tokens = None, 0, Tokens(0)
                self._num_missed = 0
            self._trainer.set_local(self._replica.outer)
            return
        carry = None
        if not is_counted and self.tokens:
            carry = self._method.contribution(self._replica.outer, self._trainer.local())
        apply()
        local = self._replica.outer.clone() if carry is not None else self._replica.outer
        if carry is not None:
            self._method.rebase(local, self._replica.outer, carry)
        else:
            self.tokens = Tokens(0)
        self._trainer.set_local(local)
