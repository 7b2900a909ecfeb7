"""Trainings that go on where they were stopped: what is through, and where the one under way stands.

folder/ stack.0.done.safetensors     what a training has made
        stack.1.state.safetensors    where the one under way stands
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from weft.clock import Clock
from weft.compose.descent import Descent, Draw, State
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.weights import not_exported

D = TypeVar("D", bound=Descent)
SAVE_S = 30.0  # at most so much is made again


class Shelf:
    """A folder with the trainings that are through, and the state of the one under way.

    Args:
        folder: is made when something is kept.

    Raises:
        ConfigError, DiskFull: something cannot be written; what was kept before is there.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._digest = Digest("")
        self._kept_at = clock.now()

    def open(self, digest: Digest) -> None:
        """Take up what is there of a work.

        Raises:
            ConfigError: it is of another one.
        """
        self._digest = digest
        for file in sorted(self._folder.glob("*.safetensors")):
            with _opened(file) as found:
                if found.metadata().get("work") != digest:
                    raise ConfigError(
                        f"{self._folder} holds another work that was begun under this name: other members, text or "
                        "settings. Give these as they were to go on with it, choose another --name, or remove it."
                    )

    def done(self, name: str) -> dict[str, Tensor] | None:
        """Return what a training has made; None: it is not through."""
        return self._read(self._file(name, "done"))

    def put(self, name: str, numbers: dict[str, Tensor]) -> None:
        self._write(self._file(name, "done"), numbers, 0)
        self._file(name, "state").unlink(missing_ok=True)

    def state(self, name: str) -> State | None:
        """Return where a training stood; None: at its beginning."""
        file = self._file(name, "state")
        if (numbers := self._read(file)) is None:
            return None
        with _opened(file) as found:
            return State(int(found.metadata()["steps"]), numbers)

    def keep(self, name: str, state: Callable[[], State]) -> None:
        """Write down where a training stands, now and then."""
        if self._clock.now() - self._kept_at >= SAVE_S:
            told = state()
            self._write(self._file(name, "state"), dict(told.tensors), told.num_steps)
            self._kept_at = self._clock.now()

    def remove(self) -> None:
        """Forget all of it: what was asked for is made, and written elsewhere."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, name: str, what: str) -> Path:
        return self._folder / f"{name.replace(' ', '.')}.{what}.safetensors"

    def _read(self, file: Path) -> dict[str, Tensor] | None:
        if not file.exists():
            return None
        with _opened(file) as found:
            return {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118  # it is no mapping

    def _write(self, file: Path, numbers: dict[str, Tensor], steps: int) -> None:
        told = {name: each.detach().cpu().contiguous() for name, each in numbers.items()}
        data, partial = save(told, {"work": self._digest, "steps": str(steps)}), file.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            partial.replace(file)
        except OSError as error:
            raise not_exported(file, error) from None


def later(draw: Draw, num: int) -> Draw:
    """Return what draws the batches that come after so many."""
    return lambda number: draw(num + number)


def through(
    name: str,
    steps: int,
    begin: Callable[[], D],
    numbers: Callable[[D], dict[str, Tensor]],
    shelf: Shelf,
    on_step: Callable[[], None],
) -> dict[str, Tensor]:
    """Return what a training of so many steps makes, going on from what the shelf holds of it.

    Args:
        name: of the training, on the shelf.
        begin: makes it, before its first step.
        numbers: what it has made.
        on_step: told of each step, also of those that were made before.

    Raises:
        NotFinite: it has diverged.
    """
    if (found := shelf.done(name)) is not None:
        for _ in range(steps):
            on_step()
        return found
    descent = begin()
    if (state := shelf.state(name)) is not None:
        descent.load(state)
    for _ in range(descent.num_steps):
        on_step()
    while descent.num_steps < steps:
        descent.step()
        on_step()
        shelf.keep(name, descent.state)
    found = {key: each.cpu() for key, each in numbers(descent).items()}
    shelf.put(name, found)
    return found


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """
    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with safe_open(file, "pt") as found:
            yield found
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Remove it: its training is made again.") from None
