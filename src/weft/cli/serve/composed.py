"""`weft serve` of what was composed: experts that are asked together, mixtures, and paths."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.options import nbytes
from weft.cli.serve.loading import How, Loaded, context_of, prepared
from weft.cli.terminal import tell
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer
    from weft.engine.engine import Serves
    from weft.engine.load import Plan
    from weft.model.came_with import CameWith


def composed_at(given: str, home: Path) -> Path | None:
    """Return the folder of experts, of a mixture or of paths that a person means; None: something else.

    Raises:
        ConfigError: it is a stack, or it is not whole.
    """
    from weft.compose.composed import Stacked, folder_of, read_composed
    from weft.compose.experts.mixtral import is_mixture
    from weft.compose.paths.folder import has_paths

    folder = folder_of(given, home)
    if folder is None:
        return Path(given) if is_mixture(Path(given)) or has_paths(Path(given)) else None
    told = read_composed(folder)
    if isinstance(told, Stacked):
        raise ConfigError(
            f"{told.name} is a stack. Write it as one model, and serve that: weft compose export {given} FOLDER"
        )
    return folder


def load_composed(folder: Path, name: str, how: How, home: Path, every: int | None = None) -> Loaded:
    """Put experts, a mixture or paths on this machine.

    Args:
        every: tokens after which a text is routed to a path again; None: never.

    Raises:
        ConfigError: no such device, more context than the models read, or the folder is not whole.
        TooLarge: no room.
    """
    from weft.compose.composed import COMPOSED, Experts, Merged, read_composed
    from weft.compose.paths.folder import has_paths

    called = name or folder.resolve().name
    if has_paths(folder):
        return _paths(folder, called, how, home, every)
    if not (folder / COMPOSED).exists():
        return _mixture(folder, called, how)
    told = read_composed(folder)
    if isinstance(told, Merged):
        return _mixture(folder / told.mixture, called, how)
    assert isinstance(told, Experts)
    return _experts(folder, told, called, how, home)


def _experts(folder: Path, told: object, name: str, how: How, home: Path) -> Loaded:
    from weft.cli.model.trained import open_trained, place
    from weft.compose.asking import engine_of, plan_of, rule_of
    from weft.compose.composed import COMPOSED, Experts
    from weft.compose.experts.split import CLUSTERS
    from weft.engine.load import free_nbytes
    from weft.wire import digest

    assert isinstance(told, Experts)
    here, kind = place(how.device), prepared(how)
    experts = [open_trained(str(folder / each), home) for each in told.members]
    first, configs = experts[0], [each.config for each in experts]
    context = context_of(how, min(each.max_seq_len for each in configs))
    planned = plan_of(configs, here, kind, context, nbytes("--cache", how.cache), free_nbytes(here))
    rule = rule_of(folder, told, first.tokenizer, here)
    given = [(each.config, each.vector) for each in experts]
    rules = [(folder / file).read_bytes() for file in (COMPOSED, CLUSTERS) if (folder / file).exists()]
    prints = digest("".join(each.fingerprint(kind) for each in experts).encode() + b"".join(rules))
    return _loaded(
        name,
        lambda on_step: engine_of(given, rule, here, planned, context, on_step),
        planned,
        (first.tokenizer, first.came_with),
        max(int(each.made_at) for each in experts),
        prints,
    )


def _mixture(folder: Path, name: str, how: How) -> Loaded:
    from weft.cli.model.trained import beside, own_tokenizer, place
    from weft.compose.asking import merged_engine, merged_plan
    from weft.compose.experts.mixtral import read_mixture, read_mixture_config
    from weft.compose.experts.mixture import mixture_layout
    from weft.engine.load import free_nbytes
    from weft.model.config import check_size
    from weft.run.machine import PeerConfig
    from weft.store.chunks import raw
    from weft.wire import digest

    here, kind = place(how.device), prepared(how)
    config = read_mixture_config(folder)
    check_size(mixture_layout(config).num_parameters, PeerConfig().max_parameters)
    context = context_of(how, config.model.max_seq_len)
    planned = merged_plan(config, here, kind, context, nbytes("--cache", how.cache), free_nbytes(here))
    _, vector = read_mixture(folder)
    words = own_tokenizer(folder, config.model.vocab_size)
    return _loaded(
        name,
        lambda on_step: merged_engine(config, vector, here, planned, context, on_step),
        planned,
        (words, beside(folder, config.model.vocab_size)),
        int(folder.stat().st_mtime),
        digest(raw(vector)),
    )


def _paths(folder: Path, name: str, how: How, home: Path, every: int | None) -> Loaded:
    from weft.cli.model.trained import open_trained, place
    from weft.compose.paths.folder import SEED, read_rerouter, read_shared, trained_folders, which_router
    from weft.compose.paths.serving import Paths
    from weft.engine.load import Beside, engine_of, free_nbytes, plan, weights_nbytes
    from weft.engine.step import page_nbytes
    from weft.wire import digest

    shared, router = read_shared(folder)
    folders = trained_folders(folder, shared)
    here, kind = place(how.device), prepared(how)
    context, others = context_of(how, shared.model.max_seq_len), len(folders) - 1
    if every is not None and every >= context:
        raise ConfigError(
            f"--route-every {every}: a text has {context} tokens at most, so none is routed again. Choose less."
        )
    rerouter = None
    if every is not None:
        rerouter = read_rerouter(folder, shared, every)
        tell(which_router(folder, every, rerouter))
    a_page, weights = page_nbytes(shared.model, kind), weights_nbytes(shared.model, kind)
    beside = Beside("the other paths", others * a_page, others * weights)
    planned = plan(shared.model, here, kind, context, nbytes("--cache", how.cache), free_nbytes(here), beside)
    begun = open_trained(str(folder / SEED), home)
    trained = {way: open_trained(str(at), home) for way, at in folders.items()}

    def engine(on_step: "Callable[[int, int, float], None]") -> Paths:
        engines = {
            way: engine_of(each.config, each.vector, here, planned, context, on_step) for way, each in trained.items()
        }
        return Paths(engines, shared.cut.paths, begun.on(how.device), (router, rerouter), every)

    prints = [router.digest, *(each.fingerprint(kind) for each in trained.values()), *([f"{every}"] if every else [])]
    prints += [] if rerouter is None else [rerouter.digest]
    made_at = max(int(each.made_at) for each in trained.values())
    print_of_all = digest("".join(prints).encode())
    return _loaded(name, engine, planned, (begun.tokenizer, begun.came_with), made_at, print_of_all)


def _loaded(
    name: str,
    engine_of: "Callable[[Callable[[int, int, float], None]], Serves]",
    planned: "Plan",
    came: "tuple[Tokenizer, CameWith]",
    made_at: int,
    prints: str,
) -> Loaded:
    from weft.serve.generation import Model, model_of
    from weft.serve.metrics import Metrics

    models: dict[str, Model] = {}
    metrics = Metrics(models)
    engine = engine_of(metrics.step(name))
    try:
        models[name] = model_of(name, made_at, engine, *came, f"{prints[:12]}-{planned.kind}")
    except BaseException:
        engine.close()
        raise
    return Loaded(models[name], planned, metrics, models)
