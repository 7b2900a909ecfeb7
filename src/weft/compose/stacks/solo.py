"""Training of one member alone: whatever it is taught, what is trained is one vector."""

from typing import Generic, TypeVar

from jaxtyping import Float32
from torch import Tensor

from weft.compose.descent import Descent, DescentConfig, Draw, Trained
from weft.compose.space import Space
from weft.compose.stacks.body import require_fit, unattached
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, over

F_co = TypeVar("F_co", bound=FlatModel, covariant=True)


class MemberDescent(Descent, Generic[F_co]):
    """Training of one member.

    Args:
        flat: what is trained: it is changed.
    """

    def __init__(self, training: DescentConfig, space: Space, flat: F_co, draw: Draw) -> None:
        super().__init__(training, draw, {"member": Trained.of(flat)})
        self._flat, self._space = flat, space

    @property
    def vector(self) -> Float32[Tensor, " num"]:
        """What is trained, which further steps change."""
        return self._flat.vector


def member_over(space: Space, member: tuple[ModelConfig, Float32[Tensor, " num"]]) -> FlatModel:
    """Return the body of a member, to be trained.

    Args:
        member: its config, and the vector of its body, which is copied.

    Raises:
        ConfigError: it does not fit the space.
    """
    config, vector = member
    require_fit(config, space, "the member")
    return over(unattached(config), vector.clone())
