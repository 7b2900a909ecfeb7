"""`weft serve` of what was composed: stacks, experts that are asked together, mixtures, and paths."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.serve.loading import Here, OnStep, Opened
from weft.cli.terminal import tell
from weft.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from weft.cli.model.trained import Trained
    from weft.compose.composed import Experts, Stacked
    from weft.engine.engine import Engine, Turns
    from weft.engine.load import Plan
    from weft.engine.numbers import Kind
    from weft.engine.step import Steps
    from weft.model.config import ModelConfig


def composed_at(given: str, home: Path) -> Path | None:
    """Return the folder of a composed model, of a mixture or of paths that a person means; None: something else."""
    from weft.compose.composed import folder_of
    from weft.compose.experts.mixtral import is_mixture
    from weft.compose.paths.folder import has_paths

    if (folder := folder_of(given, home)) is not None:
        return folder
    return Path(given) if is_mixture(Path(given)) or has_paths(Path(given)) else None


def open_composed(folder: Path, name: str, here: Here, home: Path, every: int | None = None) -> Opened:
    """Return a stack, experts, a mixture or paths.

    Args:
        name: "": as the folder is called.
        every: of paths, tokens after which a text is routed again; None: never.

    Raises:
        ConfigError: more context than the models read, exact numbers of what has none, or the folder is not whole.
    """
    from weft.compose.composed import COMPOSED, Merged, Stacked, read_composed
    from weft.compose.paths.folder import has_paths

    called = name or folder.resolve().name
    if has_paths(folder):
        return _paths(folder, called, here, home, every)
    if not (folder / COMPOSED).exists():
        return _mixture(folder, called, here)
    told = read_composed(folder)
    if isinstance(told, Merged):
        return _mixture(folder / told.mixture, called, here)
    if isinstance(told, Stacked):
        return _stack(folder, told, called, here, home)
    return _experts(folder, told, called, here, home)


def _stack(folder: Path, told: "Stacked", name: str, here: Here, home: Path) -> Opened:
    from weft.cli.model.trained import open_trained
    from weft.compose.composed import COMPOSED, MAPS, read_stack
    from weft.compose.stacks.serving import needs_of, steps_of

    members: list[Trained] = []  # without their numbers, which the stack has
    prints: list[str] = []

    def read(at: Path) -> "tuple[ModelConfig, Tensor]":
        trained = open_trained(str(at), home, may_denoise=True)  # in a stack no place sees a later one
        prints.append(trained.fingerprint(here.kind))
        members.append(replace(trained, vector=trained.vector.new_empty(0)))
        return trained.config, trained.vector

    stack = read_stack(folder, told.stack, read)
    context = here.context(min(each.config.max_seq_len for each in members), name)
    first, made_at = members[0], max(int(each.made_at) for each in members)
    vocab_size = stack.space.vocab_size
    return Opened(
        name,
        needs_of(stack, here.kind, context),
        lambda planned, on_step, turns: _engine(
            steps_of(stack, here.device, planned), vocab_size, context, planned, on_step, turns
        ),
        first.tokenizer,
        first.came_with,
        made_at,
        _print_of(prints, here.kind, folder / COMPOSED, folder / MAPS),
    )


def _experts(folder: Path, told: "Experts", name: str, here: Here, home: Path) -> Opened:
    from weft.cli.model.trained import open_trained
    from weft.compose.asking import needs_of, rule_of, steps_of
    from weft.compose.composed import COMPOSED
    from weft.compose.experts.split import CLUSTERS

    _require_rounded(here.kind, "experts that are asked together have no exact numbers: what each counts is rounded")
    experts = [open_trained(str(folder / each), home) for each in told.members]
    first, configs = experts[0], [each.config for each in experts]
    context = here.context(min(each.max_seq_len for each in configs), name)
    rule = rule_of(folder, told, first.tokenizer, here.device)
    given = [(each.config, each.vector) for each in experts]
    prints = [each.fingerprint(here.kind) for each in experts]
    return Opened(
        name,
        needs_of(configs, here.kind, context),
        lambda planned, on_step, turns: _engine(
            steps_of(given, rule, here.device, planned), configs[0].vocab_size, context, planned, on_step, turns
        ),
        first.tokenizer,
        first.came_with,
        max(int(each.made_at) for each in experts),
        _print_of(prints, here.kind, folder / COMPOSED, folder / CLUSTERS),
    )


def _mixture(folder: Path, name: str, here: Here) -> Opened:
    from weft.cli.model.trained import beside, own_tokenizer
    from weft.compose.asking import merged_needs, merged_steps
    from weft.compose.experts.mixtral import read_mixture, read_mixture_config
    from weft.compose.experts.mixture import mixture_layout
    from weft.model.config import check_size
    from weft.run.machine import PeerConfig
    from weft.store.chunks import raw
    from weft.wire import digest

    _require_rounded(here.kind, "a mixture has no exact numbers: its router's are not")
    config = read_mixture_config(folder)
    check_size(mixture_layout(config).num_parameters, PeerConfig().max_parameters)
    context, vocab_size = here.context(config.model.max_seq_len, name), config.model.vocab_size
    _, vector = read_mixture(folder)
    return Opened(
        name,
        merged_needs(config, here.kind, context),
        lambda planned, on_step, turns: _engine(
            merged_steps(config, vector, here.device, planned), vocab_size, context, planned, on_step, turns
        ),
        own_tokenizer(folder, vocab_size),
        beside(folder, vocab_size),
        int(folder.stat().st_mtime),
        f"{digest(raw(vector))[:12]}-{here.kind}",
    )


def _paths(folder: Path, name: str, here: Here, home: Path, every: int | None) -> Opened:
    from weft.cli.model.trained import open_trained
    from weft.compose.paths.folder import SEED, read_rerouter, read_shared, trained_folders, which_router
    from weft.compose.paths.serving import Paths
    from weft.engine.engine import Turns
    from weft.engine.load import Beside, engine_of, needs, weights_nbytes
    from weft.engine.step import page_nbytes

    shared, router = read_shared(folder)
    folders = trained_folders(folder, shared)
    context, others = here.context(shared.model.max_seq_len, name), len(folders) - 1
    if every is not None and every >= context:
        raise ConfigError(
            f"--route-every {every}: a text has {context} tokens at most, so none is routed again. Choose less."
        )
    rerouter = None
    if every is not None:
        rerouter = read_rerouter(folder, shared, every)
        tell(which_router(folder, every, rerouter))
    a_page, weights = page_nbytes(shared.model, here.kind), weights_nbytes(shared.model, here.kind)
    beside = Beside("the other paths", others * a_page, others * weights)
    begun = open_trained(str(folder / SEED), home)
    trained = {way: open_trained(str(at), home) for way, at in folders.items()}

    def engine(planned: "Plan", on_step: OnStep, turns: "Turns") -> Paths:
        among = Turns(turns)  # beside other models they are one
        engines = {
            way: engine_of(each.config, each.vector, here.device, planned, context, on_step, turns=among)
            for way, each in trained.items()
        }
        return Paths(engines, shared.cut.paths, begun.on(str(here.device)), (router, rerouter), every)

    prints = [
        router.digest,
        *(each.fingerprint(here.kind) for each in trained.values()),
        *([f"{every}"] if every else []),
        *([] if rerouter is None else [rerouter.digest]),
    ]
    return Opened(
        name,
        needs(shared.model, here.kind, context, beside),
        engine,
        begun.tokenizer,
        begun.came_with,
        max(int(each.made_at) for each in trained.values()),
        _print_of(prints, here.kind),
    )


def _engine(
    steps: "Steps", vocab_size: int, context: int, planned: "Plan", on_step: OnStep, turns: "Turns"
) -> "Engine":
    from weft.engine.engine import Engine

    return Engine(
        steps, vocab_size=vocab_size, context=context, num_pages=planned.num_pages, on_step=on_step, turns=turns
    )


def _require_rounded(kind: "Kind", why: str) -> None:
    """
    Raises:
        ConfigError: exact numbers, which are refused.
    """
    if kind == "exact":
        raise ConfigError(f"{why}. Choose int8 or bf16.")


def _print_of(prints: Sequence[str], kind: "Kind", *files: Path) -> str:
    """Return what names models in these numbers, and files, where they are there, that say what is made of them."""
    from weft.wire import digest

    told = b"".join(file.read_bytes() for file in files if file.exists())
    return f"{digest(''.join(prints).encode() + told)[:12]}-{kind}"
