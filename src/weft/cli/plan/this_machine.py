"""What fits this machine of somebody's own text, how fast it trains it, and what that takes of it."""

from collections.abc import Iterator
from pathlib import Path

from weft.cli.plan import speed_here
from weft.cli.plan.speed_here import Here
from weft.config import from_tree
from weft.dashboard import figures
from weft.errors import ConfigError, TooLarge
from weft.ids import several
from weft.launch.terms import CHECKPOINT_VECTORS
from weft.model.config import ModelConfig, Size, num_parameters
from weft.plan.own_text import PASSES, Answers, Text, disk_nbytes, model_of, run_tree, sizes_for, unsealed
from weft.run.config import RunFile
from weft.run.machine import PeerConfig
from weft.sync.costs import round_traffic
from weft.training.device import check_fits, choose, needed_nbytes, program_nbytes


class ThisMachine:
    """What fits this machine, how fast it is, and what a run would take of it."""

    def __init__(self, text: Text, settings: PeerConfig) -> None:
        self._text = text
        self._settings = settings
        self._device = choose(settings)
        self.is_gpu = not self._device.is_cpu
        self.sizes = sizes_for(text, lambda _model, size: self._fits(size))

    def num_parameters(self, size: Size) -> int:
        return num_parameters(self._model(size))

    def size_of(self, given: str) -> Size:
        for size in self.sizes:
            if size == given.casefold():
                return size
        raise ConfigError(
            f"--size {given[:40]}: there is no such size here. Allowed: {', '.join(self.sizes)}. A larger one does not "
            "fit this machine, or learns nothing more from so little text."
        )

    def pace(self, size: Size) -> Here:
        """Return how fast this machine trains a model of that size; takes seconds."""
        return self.pace_of(self._run_file(size), Path())

    def pace_of(self, described: RunFile, base: Path) -> Here:
        """Return how fast this machine trains what a run file describes."""
        model, settings = unsealed(described, base).model, self._settings
        return speed_here.measure(model, described.train, 1, on=settings.device, num_threads=settings.num_threads)

    def takes(self, described: RunFile, here: Here, base: Path) -> Iterator[str]:
        """Yield what a run takes, line by line; nothing that is not measured, counted or in closed form."""
        run, train = unsealed(described, base), described.train
        micro_batch = check_fits(run, self._settings, self._device)
        needed = needed_nbytes(run, self._settings, self._device, micro_batch)
        needed["cpu"] += program_nbytes(self._device)
        seconds = train.tokens / (here.tokens_per_s * described.peers)
        alike = "" if described.peers == 1 else f" by {described.peers} machines as fast as this one"
        passes = train.tokens / self._text.train_tokens  # the tokens are rounded
        often = f"{passes:.2g}" if passes < 100 else f"{passes:,.0f}"
        disk = disk_nbytes(self._text, run.num_parameters, CHECKPOINT_VECTORS)
        traffic = round_traffic(run.method, run.vector.tensors, run.num_parameters, max(2, described.peers))
        moved = figures.nbytes(traffic.sent_nbytes + traffic.received_nbytes)
        among = "with a second machine" if described.peers == 1 else f"among {described.peers} machines"
        yield f"model     {figures.amount(run.num_parameters)} parameters, context {train.seq_len} tokens"
        little = f"; more than {PASSES} teach little" if passes > 1.05 * PASSES else ""
        yield f"length    {figures.amount(train.tokens)} tokens, about {several(often, 'pass')} over the text{little}"
        yield (
            f"time      {about(seconds)} of training steps{alike}, at {here.tokens_per_s:,.0f} tokens/s "
            f"measured on {here.name}; evaluation and exchange take more"
        )
        yield f"memory    about {figures.by_place(needed)}"
        yield f"disk      about {figures.nbytes(disk)}: the text as tokens, and checkpoints"
        yield f"network   {'nothing while alone; ' if described.peers == 1 else ''}{moved} a round {among}"
        if described.peers > 1 and not described.stewards:
            yield (
                "later     once several machines hold the run, none of them can change it, or make it longer, alone. "
                "Who may is said now, with --set stewards=...: docs/stewards.md"
            )
        yield (
            "others    whoever has the ticket can join and then has this text: machines fetch it from one another. "
            "If the text must stay on this machine: recipes/private.toml"
        )

    def _fits(self, size: Size) -> bool:
        try:
            check_fits(unsealed(self._run_file(size), Path()), self._settings, self._device)
        except TooLarge:
            return False
        return True

    def _model(self, size: Size) -> ModelConfig:
        return model_of(self._text, size)

    def _run_file(self, size: Size) -> RunFile:
        answers = Answers(name="text", size=size, tokens=1 << 20, peers=1)
        return from_tree(run_tree(self._text, answers), RunFile, where="own text")


def about(seconds: float) -> str:
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"
    return f"about {seconds / 3600:.3g} h"
