"""What was computed with weights serves nothing once they were written: another thread makes the steps.

weights = AsWritten(model)
...                             # forward
with weights.needed():
    ...                         # backward: CallFailed, if a step was made since
"""

from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import CallFailed
from weft.model.flat import FlatModel


class AsWritten:
    """The weights of a model as they are when this is made."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self._num_written = model.num_written

    @property
    def are_outdated(self) -> bool:
        return self._model.num_written != self._num_written

    @contextmanager
    def needed(self) -> Iterator[None]:
        """
        Raises:
            CallFailed: they were written since this was made, or meanwhile.
        """
        self._require()
        try:
            yield
        except RuntimeError:  # torch finds it, too, where they are written meanwhile
            if not self.are_outdated:
                raise
        self._require()

    def _require(self) -> None:
        if self.are_outdated:
            raise CallFailed("the weights of its forward pass are no more: a step was made meanwhile")
