"""`weft compose reshard | reroute`: what trained paths are best at decides who reads what.

weft compose reshard talk talk2            another phase: documents dealt anew, to be trained on by `weft compose path`
weft compose reroute talk --every 64       a router of later pieces, for texts that are routed again

Both learn from documents that `weft compose route` kept apart, on which no path was trained.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.compose.parts import Device
from weft.cli.compose.paths import say_paths
from weft.cli.home import home_of
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.ids import several
from weft.progress import Meter

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64
    from numpy.typing import NDArray

    from weft.cli.model.trained import Trained
    from weft.compose.paths.features import Text
    from weft.compose.paths.folder import SharedPaths
    from weft.compose.paths.levels import Path as ModulePath
    from weft.compose.paths.routing import Router
    from weft.data.documents import Document
    from weft.model.transformer import Transformer

TrainedPaths = Annotated[Path, typer.Argument(help="Of which all paths are trained.", show_default=False)]


def reshard(
    context: typer.Context,
    folder: TrainedPaths,
    to: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    rounds: Annotated[
        int | None,
        typer.Option(
            help="After so many the paths are trained. Default: what `--more-rounds` left, or as many as before.",
            show_default=False,
            min=1,
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Deal documents anew, to the paths that are best at them, and go on with the modules as they are."""
    say_loading()
    import numpy as np
    from msgspec import structs

    from weft.compose.paths.dealing import (
        heldout_shards,
        prefixes,
        read_documents,
        read_lines,
        require_samples,
        write_documents,
    )
    from weft.compose.paths.features import features
    from weft.compose.paths.folder import RECORD, ROUTER, SEED, last_modules, shard_of, write_modules
    from weft.compose.paths.resharding import ReshardingConfig, reassigned
    from weft.compose.paths.routing import RoutingConfig
    from weft.compose.registry import copy_member
    from weft.compose.space import numbers_digest
    from weft.model.weights import require_free, whole_folder, write_json

    require_free(to)
    at = _open(context, folder)
    shared, cut = at.shared, at.shared.cut
    record = _next_phase(shared, to, rounds)
    modules = last_modules(folder, shared)
    given = read_documents(folder, cut, shared.overlap)
    apart = at.kept_apart(given.router)
    model = at.begun.on(device)
    losses = at.losses(lambda path: modules.model(path).to(model.head_weight.device), apart.texts)
    means = np.stack([[each.mean() for each in of_path] for of_path in losses], axis=1)
    words = at.begun.tokenizer
    with Meter("routing", "documents", WorkLine(), SystemClock(), len(given.train)) as meter:
        z = features(model, prefixes(words, given.train))
        meter.add(len(z))
    learnt = features(model, prefixes(words, apart.documents)), means
    config = RoutingConfig(overlap=shared.overlap)
    router, mine = reassigned(ReshardingConfig(), config, cut, learnt, z, shared.seed_model)
    require_samples(given.train, mine, cut, words, shared.seq_len)
    held = heldout_shards(router, features(model, prefixes(words, given.heldout)), shared.overlap)
    with whole_folder(to, last=RECORD) as inner:
        copy_member(folder / SEED, inner / SEED, "seed")
        (inner / ROUTER).write_bytes(router.to_bytes())
        write_modules(inner, modules.vectors)
        counted = write_documents(inner, cut, given, mine, held)
        begun = tuple(numbers_digest(modules.vectors[module]) for module in cut.modules)
        record = structs.replace(record, router=router.digest, documents=counted, begun=begun)
        write_json(inner / RECORD, record)
    typer.echo(str(to))
    _say_learnt(router, learnt, shared)
    pairs = list(zip(cut.paths, mine, strict=True))
    before = {path: frozenset(read_lines(folder / shard_of(path))) for path in cut.paths}
    num_moved = sum(given.train[number] not in before[path] for path, shard in pairs for number in shard.tolist())
    tell(f"{num_moved:,} of {several(sum(counted), 'document')} go to another path than before")
    say_paths(to, record)


def reroute(
    context: typer.Context,
    folder: TrainedPaths,
    every: Annotated[int, typer.Option(help="Tokens of a piece: of --route-every, where texts are read.", min=2)] = 64,
    device: Device = "auto",
) -> None:
    """Make the router of texts that are routed again: by a piece, the path that is best at the next."""
    say_loading()
    from weft.cli.model.trained import open_trained
    from weft.compose.paths.dealing import read_for_router
    from weft.compose.paths.folder import rerouter_file, trained_folders
    from weft.compose.paths.reading import pairs
    from weft.compose.paths.resharding import ReshardingConfig, discriminative
    from weft.model.weights import not_exported

    at = _open(context, folder)
    shared, folders = at.shared, trained_folders(folder, at.shared)
    if 2 * every > shared.seq_len + 1:
        raise ConfigError(
            f"--every {every}: samples have {shared.seq_len} tokens, and a router learns from two pieces that follow "
            f"each other. Choose at most {(shared.seq_len + 1) // 2}."
        )
    texts = [each for each in at.kept_apart(read_for_router(folder)).texts if len(each) >= 2 * every]
    if not texts:
        raise ConfigError(
            f"--every {every}: none of the documents that are kept apart has {2 * every} tokens. Choose less, or route "
            "again with longer documents."
        )
    model = at.begun.on(device)
    losses = at.losses(lambda path: open_trained(str(folders[path]), home_of(context)).on(device), texts)
    learnt = pairs(model, losses, texts, every)
    router = discriminative(ReshardingConfig(), shared.cut, *learnt, shared.seed_model, prefix=every)
    file = rerouter_file(folder, every)
    partial = file.with_suffix(".partial")
    try:
        partial.write_bytes(router.to_bytes())
        os.replace(partial, file)
    except OSError as error:
        raise not_exported(file, error) from None
    typer.echo(str(file))
    _say_learnt(router, learnt, shared, "piece")


@dataclass(frozen=True, eq=False)
class _Apart:
    """Documents that no path was trained on, and their tokens, as far as a sample goes."""

    documents: "Sequence[Document]"
    texts: "Sequence[Text]"


@dataclass(frozen=True, eq=False)
class _Opened:
    shared: "SharedPaths"
    begun: "Trained"

    def kept_apart(self, given: "Sequence[Document]") -> _Apart:
        """
        Raises:
            ConfigError: none has two tokens.
        """
        encoded = [(each, self.begun.tokenizer.encode(each.text)[: self.shared.seq_len + 1]) for each in given]
        usable = [each for each in encoded if len(each[1]) > 1]
        if not usable:
            raise ConfigError("the documents that are kept apart for routers have no two tokens. Route again.")
        return _Apart([each for each, _ in usable], [text for _, text in usable])

    def losses(
        self, model_of: "Callable[[ModulePath], Transformer]", texts: "Sequence[Text]"
    ) -> "list[list[Float64[np.ndarray, ' _']]]":
        """Return the losses of each text's tokens but the first, under each path; one path is held at a time."""
        from weft.compose.paths.features import document_losses

        paths, found = self.shared.cut.paths, []
        with Meter("reading along each path", "documents", WorkLine(), SystemClock(), len(paths) * len(texts)) as meter:
            for path in paths:
                found.append(document_losses(model_of(path), texts))
                meter.add(len(texts))
        return found


def _open(context: typer.Context, folder: Path) -> _Opened:
    from weft.cli.model.trained import open_trained
    from weft.compose.paths.folder import SEED, read_shared, require_seed, trained_folders

    shared, _ = read_shared(folder)
    trained_folders(folder, shared)  # before all that takes long
    begun = open_trained(str(folder / SEED), home_of(context))
    require_seed(folder, shared, begun.vector)
    return _Opened(shared, begun)


def _next_phase(shared: "SharedPaths", to: Path, rounds: int | None) -> "SharedPaths":
    """Return the record of the phase after, but for what documents and modules come to.

    Raises:
        ConfigError: it cannot be called as its folder, or have so many rounds.
    """
    from msgspec import structs

    from weft.compose.paths.folder import require_name, require_usable

    num = rounds or shared.more_rounds or shared.rounds
    found = structs.replace(
        shared,
        name=require_name(to.resolve().name),
        rounds=num,
        rounds_before=shared.rounds_before + shared.rounds,
        more_rounds=max(0, shared.more_rounds - num),
    )
    require_usable(found)
    if found.name == shared.name:
        raise ConfigError(f"{to}: paths of that name are there, and have runs of their own. Choose another name.")
    return found


def _say_learnt(
    router: "Router",
    learnt: "tuple[NDArray[np.float64], NDArray[np.float64]]",
    shared: "SharedPaths",
    what: str = "document",
) -> None:
    """Say how well a router has learnt which path is best, on what it has learnt from."""
    import numpy as np

    from weft.compose.paths.folder import path_called
    from weft.compose.paths.resharding import labels

    z, losses = learnt
    best, chosen = labels(losses), router.best(z)
    here = losses[np.arange(len(losses)), chosen].mean()
    tell(
        f"the router has learnt from {several(len(z), what)}, and sends {(best == chosen).mean():.0%} of them "
        f"where they are best read: {here:.4f} nats a token. {losses.mean(0).min():.4f} along the path that is best "
        f"for all, {losses.min(1).mean():.4f} along the best for each"
    )
    paths, counts = shared.cut.paths, np.bincount(best, minlength=len(shared.cut.paths))
    if never := [path_called(path) for path, num in zip(paths, counts, strict=True) if not num]:
        tell(f"best at none of them: {', '.join(never[:8])}{', ...' * (len(never) > 8)}")
