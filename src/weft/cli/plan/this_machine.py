"""What fits this machine of somebody's own text or conversations, how fast it trains, and what that takes of it."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path

from weft.cli.plan import speed_here
from weft.cli.plan.speed_here import Here
from weft.config import from_tree
from weft.cost import training as cost
from weft.dashboard import figures
from weft.errors import ConfigError, TooLarge
from weft.ids import several
from weft.launch.terms import CHECKPOINT_VECTORS
from weft.model.config import ModelConfig, Size, num_base_parameters, num_parameters
from weft.plan.own_chats import Chats
from weft.plan.own_text import Answers, Text, model_of, round_tokens, run_tree, sizes_for, unsealed
from weft.run.config import RunFile
from weft.run.machine import PeerConfig
from weft.sync.costs import round_traffic
from weft.training.device import audits_nbytes, check_fits, choose, is_exact, needed_nbytes, program_nbytes


class ThisMachine:
    """How fast this machine is, and what a run would take of it."""

    def __init__(self, settings: PeerConfig) -> None:
        self._settings = settings
        self._device = choose(settings)
        self._timed: list[tuple[object, Here]] = []
        self.is_gpu = not self._device.is_cpu

    def pace_of(self, described: RunFile, base: Path) -> Here:
        """Return how fast this machine trains what a run file describes; takes seconds, and none where it is known."""
        run, settings = unsealed(described, base), self._settings
        check_fits(run, settings, self._device)  # what does not is refused before it is timed
        train, has_rows = described.train, run.data.has_rows
        exact = is_exact(run)
        step = (run.model, train.batch_size, train.seq_len, train.optimizer, train.loss, has_rows, exact)
        for known, here in self._timed:
            if known == step:
                return here
        threads = settings.num_threads
        here = speed_here.measure(
            run.model, train, 1, on=settings.device, num_threads=threads, has_rows=has_rows, is_exact=exact
        )
        self._timed.append((step, here))
        return here

    def takes(self, described: RunFile, here: Here, base: Path, learns_from: Text | Chats) -> Iterator[str]:
        """Yield what a run takes, line by line; nothing that is not measured, counted or in closed form."""
        run, train = unsealed(described, base), described.train
        micro_batch = check_fits(run, self._settings, self._device)
        needed = needed_nbytes(run, self._settings, self._device, micro_batch)
        needed["cpu"] += program_nbytes(self._device)
        seconds = train.tokens / (here.tokens_per_s * described.peers)
        alike = "" if described.peers == 1 else f" by {described.peers} machines as fast as this one"
        passes = train.tokens / learns_from.train_tokens  # the tokens are rounded
        often = f"{passes:.2g}" if passes < 100 else f"{passes:,.0f}"
        disk = learns_from.packed_nbytes + CHECKPOINT_VECTORS * cost.vector_nbytes(run.num_parameters)
        disk += run.base_nbytes or 0
        beside = num_base_parameters(run.model)
        model = f"{'an adapter of ' if beside else ''}{figures.amount(run.num_parameters)} parameters"
        model += f", beside {figures.amount(beside)} that stay as they are" if beside else ""
        traffic = round_traffic(run.method, run.vector.tensors, run.num_parameters, max(2, described.peers))
        moved = figures.nbytes(traffic.sent_nbytes + traffic.received_nbytes)
        among = "with a second machine" if described.peers == 1 else f"among {described.peers} machines"
        most, kind = learns_from.most_passes, learns_from.kind
        yield f"model     {model}, context {train.seq_len} tokens"
        little = f"; more than {most} teach little" if passes > 1.05 * most else ""
        rounds = several(ceil(train.tokens / round_tokens(described)), "round")
        yield (
            f"length    {figures.amount(train.tokens)} tokens in {rounds}, about {several(often, 'pass')} over the "
            f"{kind}{little}"
        )
        yield (
            f"time      {about(seconds)} of training steps{alike}, at {here.tokens_per_s:,.0f} tokens/s "
            f"measured on {here.name}; evaluation and exchange take more"
        )
        audits = f", {figures.nbytes(audits_nbytes(run))} of it for audits" if audits_nbytes(run) else ""
        yield f"memory    about {figures.by_place(needed)}{audits}"
        also = "the model, " if beside else ""
        yield f"disk      about {figures.nbytes(disk)}: the {kind} as tokens, {also}and checkpoints"
        yield f"network   {'nothing while alone; ' if described.peers == 1 else ''}{moved} a round {among}"
        if described.peers > 1 and not described.stewards:
            yield (
                "later     once several machines hold the run, none of them can change it, or make it longer, alone. "
                "Who may is said now, with --set stewards=...: docs/stewards.md"
            )
        if described.is_private:
            yield f"others    whoever has the ticket can join, with {kind} of its own; those here stay here"
            return
        yield (
            f"others    whoever has the ticket can join and then has the {kind}, which machines fetch from one "
            f"another. {learns_from.to_keep_it}"
        )

    def fits(self, described: RunFile) -> bool:
        try:
            check_fits(unsealed(described, Path()), self._settings, self._device)
        except TooLarge:
            return False
        return True


class Sizes:
    """Which models this machine can train from nothing on a text."""

    def __init__(self, text: Text, machine: ThisMachine) -> None:
        self._text = text
        self._machine = machine
        self.all = sizes_for(text, lambda _model, size: machine.fits(self._run_file(size)))

    def num_parameters(self, size: Size) -> int:
        return num_parameters(self._model(size))

    def size_of(self, given: str) -> Size:
        for size in self.all:
            if size == given.casefold():
                return size
        raise ConfigError(
            f"--size {given[:40]}: there is no such size here. Allowed: {', '.join(self.all)}. A larger one does not "
            "fit this machine, or learns nothing more from so little text."
        )

    def pace(self, size: Size) -> Here:
        """Return how fast this machine trains a model of that size; takes seconds."""
        return self._machine.pace_of(self._run_file(size), Path())

    def _model(self, size: Size) -> ModelConfig:
        return model_of(self._text, size)

    def _run_file(self, size: Size) -> RunFile:
        answers = Answers(name="text", size=size, tokens=1 << 20, peers=1)
        return from_tree(run_tree(self._text, answers), RunFile, where="own text")


def about(seconds: float) -> str:
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min" if seconds > 90 else f"about {seconds:.0f} s"
    return f"about {seconds / 3600:.3g} h"
