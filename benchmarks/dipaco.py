"""Paths through shared modules (DiPaCo) against dense models: writes benchmarks/reports/dipaco.md.

    python -m benchmarks.dipaco --into FILE                # both setups, some 125 minutes of one core; goes on from
    python -m benchmarks.dipaco --into FILE --only 2x2     # where it was stopped; 4x4 takes 75 of them
    python -m benchmarks.dipaco --into FILE --seeds 3      # as long for each
    python -m benchmarks.dipaco --into FILE --report       # writes the report of what is there

All paths of a setup train in one process, by turns (`weft.compose.paths.play`), on text of this machine in domains,
which routing is never told. All begin as one dense model; its features decide where documents go. Dense models are of
a path's size or have as many parameters as all modules, each with a path's steps and with the compute of all paths and
of their routing. The outer step is chosen of three by the validation loss at half time, the paper's being one; then the
half that is best goes on in three ways: as it is, with documents assigned anew, and that with a path killed and taken
over.

Losses are per held-out document, the first 32 tokens of each not scored; differences are paired, with their standard
error by file of text: several documents are of one file. Another seed has other models, draws and clusters, and the
same text. CPU seconds are those of this one process: on a busy machine they are longer.
"""

import argparse
import dataclasses
import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import _dipaco_told as told
from benchmarks._dipaco_told import ANEW, AS_IS, KILLED, Losses, Row
from benchmarks._domains import DOMAINS, Sizes, Text, text
from benchmarks.report import FOLDER, table, whole
from weft import wire
from weft.compose.paths import levels as paths
from weft.compose.paths.features import features, token_losses
from weft.compose.paths.levels import Levels, LevelsConfig
from weft.compose.paths.modules import Modules
from weft.compose.paths.outer import OuterStepConfig
from weft.compose.paths.play import InnerStepsConfig, Play, Steps
from weft.compose.paths.reading import Found, Reader, pairs
from weft.compose.paths.resharding import ReshardingConfig, discriminative, reassigned
from weft.compose.paths.routing import PREFIX, Router, RoutingConfig, Shards, generative, shards
from weft.compose.paths.stopping import EarlyStopping
from weft.compose.space import numbers_digest
from weft.errors import NotFinite
from weft.model.config import ModelConfig, num_parameters
from weft.model.flat import assemble, over
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.rng import stream
from weft.sync.method.schedule import CosineConfig

Windows = NDArray[np.int64]

SEED = 1  # the first; of the text, for all
VOCAB, SEQ_LEN, BATCH, LR = 1024, 256, 8, 1e-3
TOKENS_OF_STEP = BATCH * SEQ_LEN
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    width=128,
    ffn_width=384,
    max_seq_len=SEQ_LEN,
    is_tied=True,
)
EVERY = 64  # tokens after which a text is routed again
SIZES = Sizes(vocab_size=VOCAB, seq_len=SEQ_LEN, num_held_out=32, num_router=512, seed=SEED)
NUM_VALIDATION = 16  # documents of each path
OUTER = {
    "the paper's": OuterStepConfig(),
    "the paper's, plain mean": OuterStepConfig(rescale="none"),
    "gentler, plain mean": OuterStepConfig(lr=0.9, momentum=0.3, rescale="none"),
}


@dataclass(frozen=True)
class Setup:
    """
    Args:
        every: training steps of a round.
        num_rounds: even: at half time it branches.
        num_begun: steps of the model that all begin as.
    """

    levels: tuple[int, ...]
    every: int
    num_rounds: int
    num_begun: int = 300

    @property
    def num_steps(self) -> int:
        """Of each path."""
        return self.every * self.num_rounds

    def scaled(self, scale: float) -> "Setup":
        every, num_begun = (max(1, round(scale * num)) for num in (self.every, self.num_begun))
        return dataclasses.replace(self, every=every, num_begun=num_begun)


SETUPS = {"2x2": Setup((2, 2), every=40, num_rounds=10), "4x4": Setup((4, 4), every=16, num_rounds=8)}


def configured() -> str:
    """Return what names the settings that all rows depend on."""
    settings = (MODEL, LR, BATCH, EVERY, SIZES, NUM_VALIDATION, SETUPS, OUTER, RoutingConfig(), ReshardingConfig())
    return wire.digest(msgspec.json.encode(settings))


# --- training ---


def cpu_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def inner(num_steps: int, num_begun: int, *, every: int = 1) -> InnerStepsConfig:
    """Return the settings of a model that makes `num_steps` steps after those it began with: one cosine over both."""
    total = (num_begun + num_steps) * TOKENS_OF_STEP
    schedule = CosineConfig(lr=LR, warmup_tokens=min(30 * TOKENS_OF_STEP, total // 10), total_tokens=total)
    return InnerStepsConfig(every=every, batch_size=BATCH, schedule=schedule, begun_tokens=num_begun * TOKENS_OF_STEP)


def dense(
    config: ModelConfig, settings: InnerStepsConfig, windows: Windows, num: int, begun: torch.Tensor, seed: int
) -> torch.Tensor:
    """Return the vector that a dense model comes to."""
    with torch.device("meta"):
        model = Transformer(config)
    flat = over(model, begun.clone())
    Steps(settings, flat).make(windows, num, lambda step: stream(seed, "dipaco", "dense", step))
    return flat.vector


def begun_of(setup: Setup, windows: Windows, seed: int) -> torch.Tensor:
    """Return the model that all paths begin as: the first steps of a dense one's."""
    settings = inner(setup.num_steps + setup.num_begun, 0)
    return dense(MODEL, settings, windows, setup.num_begun, initial_vector(MODEL, seed), seed)


def scored(losses: NDArray[np.float64], text: Text) -> Losses:
    """Return the losses of held-out documents by domain, as they lie one after the other."""
    found, start = Losses(), 0
    for name, windows in text.held_out.items():
        found[name] = [round(float(loss), 5) for loss in losses[start : start + len(windows)]]
        start += len(windows)
    return found


def all_held_out(text: Text) -> Windows:
    return np.concatenate(list(text.held_out.values()))


def dense_losses(config: ModelConfig, vector: torch.Tensor, text: Text) -> Losses:
    losses = token_losses(assemble(config, vector), all_held_out(text))[:, PREFIX - 1 :].mean(1)
    return scored(losses, text)


# --- one setup ---


class Trial:
    """One setup and one seed: rows that are there are not made again, nor are states that later rows begin with.

    Args:
        scale: of the setup's steps.
        folder: where states lie.
    """

    def __init__(
        self, place: tuple[str, int], scale: float, text: Text, folder: Path, rows: list[Row], keep: Callable[[], None]
    ) -> None:
        self.name, self.seed = place
        self.setup, self.text, self.rows = SETUPS[self.name].scaled(scale), text, rows
        self._folder, self._keep = folder, keep
        self.levels = Levels(LevelsConfig(levels=self.setup.levels), MODEL)
        self.begun = self._state("begun", lambda: {"vector": begun_of(self.setup, text.train, self.seed)})["vector"]
        self._model = assemble(MODEL, self.begun)
        self.features = numbers_digest(self.begun)
        self._z = features(self._model, list(text.train[:, :PREFIX]))

    def run(self) -> None:
        self._dense_rows()
        routing = RoutingConfig(num_tries=8)
        router = generative(routing, self.levels, self._z, self.features, self.seed)
        first = self._dealt(router, shards(router.scores(self._z), least=routing.least))
        chosen, half = self._half(router, first)
        self._branch(AS_IS, router, router, first, chosen, half)
        again, later, second = self._resharded(first, chosen, half)
        self._branch(ANEW, again, later, second, chosen, half)
        self._branch(KILLED, again, later, second, chosen, half, is_killed=True)

    # --- dense models ---

    def _dense_rows(self) -> None:
        levels, steps, begun = self.levels, self.setup.num_steps, self.setup.num_begun
        deep = msgspec.structs.replace(MODEL, num_layers=MODEL.num_layers * self.setup.levels[0])  # as all modules have
        assert num_parameters(deep) == levels.num_all_parameters
        ratio, of_all = num_parameters(deep) / num_parameters(MODEL), self._num_steps(1, is_anew=True)

        def goes_on(num: int) -> torch.Tensor:
            return dense(MODEL, inner(num, begun), self.text.train, num, self.begun, self.seed)

        def from_nothing(num: int) -> torch.Tensor:
            return dense(deep, inner(num, 0), self.text.train, num, initial_vector(deep, self.seed), self.seed)

        self._row("dense: what all began as", MODEL, lambda: self.begun, begun)
        self._row(told.PATH_SIZED, MODEL, lambda: goes_on(steps), begun + steps)
        self._row(told.PATH_SIZED_ON, MODEL, lambda: goes_on(round(of_all) - begun), round(of_all))
        self._row(told.DEEP, deep, lambda: from_nothing(begun + steps), (begun + steps) * ratio)
        num_deep = round(of_all / ratio)
        self._row(told.DEEP_ON, deep, lambda: from_nothing(num_deep), num_deep * ratio)

    def _row(self, name: str, config: ModelConfig, make: Callable[[], torch.Tensor], num_steps: float) -> None:
        if self._has(name):
            return
        before = cpu_s()
        losses = dense_losses(config, make(), self.text)
        self._add(name, losses, num_steps, before, num_parameters=num_parameters(config))

    # --- paths ---

    def _half(self, router: Router, first: Mapping[paths.Path, Windows]) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the name of the outer step that is best at half time, and the state it has come to."""
        found = {}
        for number, (name, outer) in enumerate(OUTER.items()):
            row_name = f"paths at half time: {name}"
            before = cpu_s()
            state = self._state(f"half{number}", lambda outer=outer: self._first_half(outer, first))  # type: ignore[misc]
            if not self._has(row_name):
                if "rounds" not in state:
                    self._add(row_name, {}, 0, before, note="diverged")
                else:
                    play = self._play(outer, first, state)
                    read = self._read(play.modules, router, self.text.validation)
                    found_here = self._read(play.modules, router, all_held_out(self.text))
                    self._add_found(
                        row_name, found_here, self._num_steps(0.5), before, note=f"validation {read.mean:.4f}"
                    )
            row = next(row for row in self.rows if self._is(row, row_name))
            if "rounds" in state:
                found[name] = (float(row.note.split()[-1]), state)
        best = min(found, key=lambda name: found[name][0])
        return best, found[best][1]

    def _first_half(self, outer: OuterStepConfig, first: Mapping[paths.Path, Windows]) -> dict[str, torch.Tensor]:
        play = self._play(outer, first, None)
        try:
            for _ in range(self.setup.num_rounds // 2):
                play.round()
        except NotFinite as error:
            print(error, flush=True)
            return {"diverged": torch.ones(1)}
        return play.state()

    def _branch(
        self,
        name: str,
        router: Router,
        rerouter: Router,
        windows: Mapping[paths.Path, Windows],
        outer: str,
        half: dict[str, torch.Tensor],
        *,
        is_killed: bool = False,
    ) -> None:
        """Train the second half, and add what it comes to: routed once, and again and again."""
        once, often = told.once(name), told.often(name, EVERY)
        if self._has(often):
            return
        before, setup = cpu_s(), self.setup
        play, stopping = self._play(OUTER[outer], windows, half), EarlyStopping()
        validation = self._validation(router)
        victim, quarter = self.levels.paths[len(self.levels.paths) // 2], setup.num_rounds // 4
        for number in range(setup.num_rounds - setup.num_rounds // 2):
            play.round(without={victim} if is_killed and number in (quarter - 1, quarter) else ())
            for path in self.levels.paths:
                loss = float(token_losses(play.modules.model(path), validation[path]).mean())
                stopping.hear(path, loss, play.num_rounds, play.modules.vector(path))
        lost, held_out = "two rounds of one path are lost" if is_killed else "", all_held_out(self.text)
        num_steps = self._num_steps(1, is_anew=name != AS_IS)
        self._add_found(once, self._read(play.modules, router, held_out), num_steps, before, note=lost)
        if name == ANEW:
            best = {path: assemble(MODEL, stopping.best[path].vector) for path in self.levels.paths}
            early = sum(stopping.best[path].round < setup.num_rounds for path in self.levels.paths)
            found = Reader(self.levels, best.__getitem__, self.begun, router, EVERY, rerouter).read(held_out)
            note = f"{early} of {len(best)} paths stopped before the end"
            self._add_found(f"{often}, stopped early", found, num_steps, before, note=note)
            each = [
                token_losses(play.modules.model(path), held_out)[:, PREFIX - 1 :].mean(1) for path in self.levels.paths
            ]
            losses = scored(np.min(each, axis=0), self.text)
            self._add(f"paths, {name}, an oracle routes once", losses, num_steps, before, note="it has read the text")
        # The last of a branch: where it is there, all of them are.
        self._add_found(
            often, self._read(play.modules, router, held_out, EVERY, rerouter), num_steps, before, note=lost
        )

    def _resharded(
        self, first: Mapping[paths.Path, Windows], outer: str, half: dict[str, torch.Tensor]
    ) -> tuple[Router, Router, dict[paths.Path, Windows]]:
        """Return the router by what paths are best at, that of later pieces, and the shards by the first."""
        config, modules, windows = ReshardingConfig(), self._play(OUTER[outer], first, half).modules, self.text.router
        losses = [token_losses(modules.model(path), windows) for path in self.levels.paths]
        learnt = features(self._model, list(windows[:, :PREFIX])), np.stack([each.mean(1) for each in losses], axis=1)
        router, mine = reassigned(config, RoutingConfig(), self.levels, learnt, self._z, self.features)
        found = pairs(self._model, [list(each) for each in losses], list(windows), EVERY)
        later = discriminative(config, self.levels, *found, self.features, prefix=EVERY)
        return router, later, self._dealt(router, mine)

    def _play(
        self, outer: OuterStepConfig, windows: Mapping[paths.Path, Windows], state: dict[str, torch.Tensor] | None
    ) -> Play:
        settings = inner(self.setup.num_steps, self.setup.num_begun, every=self.setup.every)
        play = Play(Modules.of(self.levels, self.begun), settings, outer, windows, self.seed)
        if state is not None:
            play.load(state)
        return play

    def _dealt(self, router: Router, mine: Shards) -> dict[paths.Path, Windows]:
        """Return each path's windows, and say of which domains they are."""
        for path, shard in zip(self.levels.paths, mine, strict=True):
            counts = np.bincount(self.text.domains[shard], minlength=len(self.text.names))
            of = ", ".join(f"{name} {num}" for name, num in zip(self.text.names, counts, strict=True) if num)
            print(f"{self.name} {router.record.kind} {path}: {of}", flush=True)
        return {path: self.text.train[shard] for path, shard in zip(self.levels.paths, mine, strict=True)}

    def _validation(self, router: Router) -> dict[paths.Path, Windows]:
        """Return the validation documents of each path's shard."""
        z = features(self._model, list(self.text.validation[:, :PREFIX]))
        one = (len(self.levels.paths) + 0.5) / len(z)  # document for each path, at least
        mine = shards(router.scores(z), least=max(RoutingConfig().least, one))
        return {
            path: self.text.validation[shard[:NUM_VALIDATION]]
            for path, shard in zip(self.levels.paths, mine, strict=True)
        }

    def _read(
        self,
        modules: Modules,
        router: Router,
        windows: Windows,
        every: int | None = None,
        rerouter: Router | None = None,
    ) -> Found:
        models = {path: modules.model(path) for path in self.levels.paths}
        return Reader(self.levels, models.__getitem__, self.begun, router, every, rerouter).read(windows)

    def _num_steps(self, share: float, *, is_anew: bool = False) -> float:
        """Return the steps of all paths together, with what routing reads: reading is a third of a step."""
        num_paths, text = len(self.levels.paths), self.text
        read = len(text.train) * PREFIX / SEQ_LEN + is_anew * num_paths * len(text.router)
        return self.setup.num_begun + share * num_paths * self.setup.num_steps + read / (3 * BATCH)

    # --- what is kept ---

    def _has(self, name: str) -> bool:
        return any(self._is(row, name) for row in self.rows)

    def _is(self, row: Row, name: str) -> bool:
        return (row.setup, row.seed, row.name) == (self.name, self.seed, name)

    def _add_found(self, name: str, found: Found, num_steps: float, before: float, note: str = "") -> None:
        again = tuple(cost.num_again / (cost.num_read - cost.num_again) for cost in (found.dropping, found.keeping))
        losses = scored(found.losses / found.num_scored, self.text)
        self._add(name, losses, num_steps, before, note=note, read_again=again)

    def _add(
        self,
        name: str,
        losses: Losses,
        num_steps: float,
        before: float,
        *,
        num_parameters: int = num_parameters(MODEL),
        read_again: tuple[float, ...] = (0.0, 0.0),
        note: str = "",
    ) -> None:
        row = Row(
            setup=self.name,
            seed=self.seed,
            name=name,
            losses=losses,
            num_parameters=num_parameters,
            num_steps=num_steps,
            cpu_s=round(cpu_s() - before, 1),
            read_again=(read_again[0], read_again[1]),
            note=note,
        )
        self.rows[:] = [each for each in self.rows if not self._is(each, name)] + [row]
        self._keep()
        loss = f"{row.all_losses.mean():.4f}" if row.losses else "-"
        print(f"{self.name} seed {self.seed} {name}: {loss} {note} ({row.cpu_s:.0f} CPU s)", flush=True)

    def _state(self, name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return a state that lies there, or is made and put there."""
        path = self._folder / f"{self.name}.{self.seed}.{name}.npz"
        if not path.exists():
            beside = path.with_suffix(".new.npz")
            np.savez(beside, **{each: tensor.numpy() for each, tensor in make().items()})  # type: ignore[arg-type]
            os.replace(beside, path)
        with np.load(path) as found:
            return {each: torch.from_numpy(found[each]) for each in found.files}


# --- the report ---


def setup_sections(name: str, rows: told.Rows, files: Sequence[int]) -> list[str]:
    setup = SETUPS[name]
    levels = Levels(LevelsConfig(levels=setup.levels), MODEL)
    path, num_paths = levels.paths[0], len(levels.paths)
    step = 2 * (num_paths - 1) / num_paths * num_parameters(MODEL) * 4
    sent = [
        ["parameters of all modules", levels.num_all_parameters],
        ["of a path", levels.num_path_parameters],
        ["bytes that a path's peer sends in a round, fp32", levels.round_nbytes(path)],
        [f"in all {setup.num_rounds} rounds", setup.num_rounds * levels.round_nbytes(path)],
        [
            f"of {num_paths} peers that average gradients of one such model in each of as many steps",
            round(step * setup.num_steps),
        ],
    ]
    return [
        f"## {name}: {num_paths} paths, {setup.num_rounds} rounds of {setup.every} steps, after {setup.num_begun}",
        told.of_seeds(rows),
        told.of_models(rows, files),
        table(["what is sent", ""], sent),
        told.by_domain(rows),
    ]


def report(rows: Sequence[Row], about: dict[str, object]) -> str:
    files: list[int] = about["files"]  # type: ignore[assignment]
    missing = [domain.name for domain in DOMAINS if domain.name not in about["nbytes"]]  # type: ignore[operator]
    had = ", ".join(f"{name} {nbytes:,}" for name, nbytes in about["nbytes"].items())  # type: ignore[attr-defined]
    lines = [
        f"Text of this machine, bytes: {had}. Not there: {', '.join(missing) or 'none'}. {about['num_train']:,} "
        f"documents of {SEQ_LEN} tokens to train on, {about['token_nbytes']:.2f} bytes per token, {VOCAB} pieces. A "
        f"path: {num_parameters(MODEL):,} parameters; a step: {BATCH} documents. Of all steps, and of the text, "
        f"{about['scale']:g}. {len(files)} held-out documents of {len(set(files))} files."
    ]
    setups = {name: mine for name in SETUPS if (mine := told.rows_of(name, rows))}
    sections = [
        (__doc__ or "").split("\n\n", 1)[1].strip("\n"),
        *lines,
        "## What the paper claims, and what is seen",
        told.CLAIMS,
        told.claims(setups, files, EVERY),
    ]
    for name, mine in setups.items():
        sections += setup_sections(name, mine, files)
    return whole(
        "Paths through shared modules against dense models", "python -m benchmarks.dipaco --into FILE", sections
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--into", type=Path, required=True, help="where rows are kept, one a line; states lie beside it"
    )
    parser.add_argument("--only", choices=SETUPS, help="one setup")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of all numbers of steps and of the text; below 1 no report is written"
    )
    parser.add_argument("--report", action="store_true", help="train nothing, and write the report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.into.read_text("utf-8").split("\n")[:-1] if options.into.exists() else []
    about = json.loads(lines[0]) if lines else {}
    rows = [msgspec.json.decode(line, type=Row) for line in lines[1:]] if "configured" in about else []
    if not options.report:
        here = text(SIZES.scaled(options.scale), options.scale)
        now = {
            "text": here.digest,
            "scale": options.scale,
            "nbytes": here.nbytes,
            "token_nbytes": here.token_nbytes,
            "num_train": len(here.train),
            "files": [int(file) for each in here.held_out_files.values() for file in each],
            "configured": configured(),
        }
        if about and any(about.get(key) != now[key] for key in ("text", "scale", "files", "configured")):
            print(f"{options.into}: its rows are of other text, another scale or other settings. Name another file.")
            return 2
        about = now

        def keep() -> None:
            beside = options.into.with_name(options.into.name + ".new")
            beside.write_text(
                "".join(json.dumps(each) + "\n" for each in (about, *map(dataclasses.asdict, rows))), "utf-8"
            )
            os.replace(beside, options.into)

        folder = options.into.with_name(options.into.name + ".states")
        folder.mkdir(exist_ok=True)
        for seed in range(SEED, SEED + options.seeds):
            for name in SETUPS:
                if options.only in (None, name):
                    Trial((name, seed), options.scale, here, folder, rows, keep).run()
    if about.get("configured") != configured():
        print(f"{options.into}: it has no rows of these settings. Leave --report out, or name another file.")
        return 2
    found = report(rows, about)
    if about["scale"] == 1.0:
        (FOLDER / "dipaco.md").write_text(found, encoding="utf-8")
    print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
