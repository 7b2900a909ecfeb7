"""What is in step with the stages."""

from typing import Protocol

from weft.pipeline.step import Beat


class Conducted(Protocol):
    @property
    def beat(self) -> Beat:
        """Return the first step of the round that it is in."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether it has been in any round, since this process began."""
        ...
