"""`weft compose route | path`: paths through shared modules, each trained by a peer that reads its own documents.

weft compose route english talk --data 'texts/**' --levels 2,2
weft compose path talk 0.0                                    prints a ticket of each module
weft compose path talk 0.1 --tickets tickets.txt              elsewhere, with a copy of the folder
weft serve talk                                               once all paths are trained: each text goes its path
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.compose.described import described
from weft.cli.compose.parts import USUAL_BATCH
from weft.cli.home import find_checkpoint, home_of
from weft.cli.options import own_source
from weft.cli.settings import Machine, Transports, check_transports, machine_settings
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.dashboard import figures
from weft.errors import ConfigError
from weft.ids import several
from weft.progress import Meter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weft.compose.paths.dealing import Documents
    from weft.compose.paths.features import Text
    from weft.compose.paths.folder import SharedPaths
    from weft.compose.paths.levels import Module
    from weft.compose.paths.levels import Path as ModulePath
    from weft.compose.paths.stopping import Best
    from weft.compose.paths.training import Part
    from weft.data.tokenizer import Tokenizer
    from weft.model.flat import FlatModel

MOST_ROUTED = 20_000  # documents by which centres are found
MOST_HELDOUT = 64  # documents by which a path is measured after each round
_TICKET = re.compile(r"\A(\d+\.\d+)\s+(weft\d\S*)\Z")


class Ends(StrEnum):
    shared = "shared"
    path = "path"


class Clusters(StrEnum):
    k_means = "k-means"
    product = "product"


class Keep(StrEnum):
    best = "best"
    last = "last"


def route(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="What all paths begin as: a folder, a member or a run.", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    data: Annotated[list[str], typer.Option(help="Documents, folders or globs; may be repeated.", show_default=False)],
    levels: Annotated[str, typer.Option(help="Modules of each level, first to last: 2,2 makes 4 paths.")] = "2,2",
    ends: Annotated[Ends, typer.Option(help="Whose embedding, last norm and head are: of all, or each path's.")] = (
        Ends.shared
    ),
    how: Annotated[
        Clusters,
        typer.Option(
            help="Centres of documents: one for each path (k-means); or for each module, of a part of the features "
            "(product k-means), where paths are many."
        ),
    ] = Clusters.k_means,
    overlap: Annotated[int, typer.Option(help="Paths that train on a document.", min=1)] = 1,
    rounds: Annotated[int, typer.Option(help="After so many the paths are trained.", min=1)] = 20,
    more_rounds: Annotated[
        int,
        typer.Option(
            "--more-rounds",
            help="That will follow, with documents dealt anew (`weft compose reshard`): the learning rate falls over "
            "all of them.",
            min=0,
        ),
    ] = 0,
    steps: Annotated[int, typer.Option(help="Training steps of a path in a round.", min=1)] = 150,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Samples in each step.", min=1)] = USUAL_BATCH,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens of a sample; 0: as the model reads.", min=0)] = 0,
    lr: Annotated[float, typer.Option(help="Peak learning rate of a path's own steps.", min=1e-9, max=10.0)] = 4e-4,
    heldout: Annotated[float, typer.Option(help="Share of documents that nobody trains on.", min=0.0, max=0.5)] = 0.05,
    router_share: Annotated[
        float,
        typer.Option(
            "--router-share",
            help="Share of documents from which routers learn later which path is best, and on which none trains.",
            min=0.0,
            max=0.5,
        ),
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of what is drawn.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="Where torch runs.")] = "auto",
) -> None:
    """Cut a model into levels of modules, and say which documents each path through them reads."""
    counts = _levels(levels)
    source = find_checkpoint(model, home_of(context))
    say_loading()
    from msgspec import structs

    from weft.cli.model.trained import open_trained
    from weft.compose.paths.dealing import heldout_shards, prefixes, require_samples, write_documents
    from weft.compose.paths.features import features
    from weft.compose.paths.folder import RECORD, ROUTER, SEED, SharedPaths, require_name, require_usable
    from weft.compose.paths.levels import Levels, LevelsConfig
    from weft.compose.paths.routing import RoutingConfig, generative, shards
    from weft.compose.registry import write_member
    from weft.compose.space import numbers_digest
    from weft.model.config import plain
    from weft.model.weights import require_free, whole_folder, write_json

    require_free(folder)
    trained = open_trained(str(source), home_of(context))
    cut = Levels(LevelsConfig(levels=counts, ends=ends.value), plain(trained.config))
    length = seq_len or min(cut.model.max_seq_len, 1024)
    if length > cut.model.max_seq_len:
        raise ConfigError(f"--seq-len {seq_len}: the model reads {cut.model.max_seq_len} tokens at most.")
    named = numbers_digest(trained.vector)
    record = SharedPaths(
        name=require_name(folder.resolve().name),
        levels=cut.config,
        model=cut.model,
        tokenizer=trained.tokenizer.digest,
        seed_model=named,
        router=named,  # until there is one
        steps=steps,
        rounds=rounds,
        more_rounds=more_rounds,
        batch_size=batch_size,
        seq_len=length,
        lr=lr,
        documents=(1,) * len(cut.paths),
        overlap=overlap,
    )
    require_usable(record)
    config = RoutingConfig(kind="k_means" if how is Clusters.k_means else "product_k_means", overlap=overlap)
    given = _given(data, heldout, router_share, seed)
    reader = trained.on(device)
    with Meter("routing", "documents", WorkLine(), SystemClock(), len(given.train) + len(given.heldout)) as meter:
        z = features(reader, prefixes(trained.tokenizer, given.train))
        meter.add(len(z))
        z_held = features(reader, prefixes(trained.tokenizer, given.heldout))
        meter.add(len(z_held))
    router = generative(config, cut, z[:: -(-len(z) // MOST_ROUTED)], named, seed)
    mine = shards(router.scores(z), overlap=overlap, least=config.least)
    require_samples(given.train, mine, cut, trained.tokenizer, length)
    with whole_folder(folder, last=RECORD) as inner:
        write_member(inner / SEED, described("seed", trained, home_of(context)), trained.export)
        (inner / ROUTER).write_bytes(router.to_bytes())
        counted = write_documents(inner, cut, given, mine, heldout_shards(router, z_held, overlap))
        record = structs.replace(record, router=router.digest, documents=counted)
        write_json(inner / RECORD, record)
    typer.echo(str(folder))
    say_paths(folder, record)


def say_paths(folder: Path, shared: "SharedPaths") -> None:
    """Say what each path of a folder reads and sends, and what comes next."""
    from weft.compose.paths.folder import path_called

    paths = shared.cut.paths
    for way, num in zip(paths, shared.documents, strict=True):
        nbytes = figures.nbytes(shared.cut.round_nbytes(way))
        tell(f"path {path_called(way)}: {several(num, 'document')}; {nbytes} sent in a round, before they are packed")
    tell(f"copy the folder to who trains a path: weft compose path {folder} {path_called(paths[0])}")


def path(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="That `weft compose route` wrote.", show_default=False)],
    which: Annotated[str, typer.Argument(metavar="PATH", help="A number of each level: 0.1.", show_default=False)],
    tickets: Annotated[
        Path | None,
        typer.Option(help="File of lines that other paths have printed: a module and its ticket.", metavar="FILE"),
    ] = None,
    keep: Annotated[
        Keep, typer.Option(help="Write the path as it was best on its held-out documents, or as it is at the end.")
    ] = Keep.best,
    device: Annotated[str, typer.Option(help="Where torch runs.")] = "auto",
    transports: Transports = None,
    machine: Machine = None,
) -> None:
    """Train a path, its modules together with the other paths that contain them. Prints tickets of those it begins."""
    from weft.compose.paths.folder import TRAINED, called, path_called, path_of, read_shared
    from weft.model.weights import not_exported

    shared, _ = read_shared(folder)
    mine = path_of(which, shared.cut)
    known = {} if tickets is None else _tickets(tickets)
    modules = shared.cut.modules_of(mine)
    for module in modules:
        if called(module) not in known and shared.founder(module) != mine:
            raise ConfigError(
                f"module {called(module)} is begun by path {path_called(shared.founder(module))}, which prints its "
                "ticket. Put that line into a file, and name it with --tickets."
            )
    target = folder / TRAINED / path_called(mine)
    if target.exists():
        raise ConfigError(
            f"{target}: the path is trained. Once all are, train on with documents dealt anew: weft compose reshard."
        )
    try:
        target.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise not_exported(target.parent, error) from None
    settings = machine_settings(machine, {"transports": check_transports(transports)}, use="loop")
    say_loading()
    import torch

    from weft.cli.model.trained import open_trained, place
    from weft.compose.paths.folder import SEED, begun_vector, write_trained
    from weft.compose.paths.training import Part
    from weft.library.given import Machine as Library
    from weft.library.sync import Sync
    from weft.model.flat import cut, layout, over
    from weft.model.transformer import Transformer

    begun = open_trained(str(folder / SEED), home_of(context))
    vector = begun_vector(folder, shared, mine, begun.vector)
    windows = _windows(folder, mine, shared, begun.tokenizer)
    with torch.device("meta"):
        model = Transformer(shared.model)
    flat = over(model, vector.to(place(device)))
    watch = Watch(_heldout(folder, mine, shared, begun.tokenizer) if keep is Keep.best else [])
    if keep is Keep.best and not watch.texts:
        tell("nothing is held out for this path: it is written as it is at the end")
    parts = {}
    for module in modules:
        spans = layout(shared.model, shared.cut.section_of(module))
        named = {span.name: _tensor(flat, span.name) for span in spans}
        given = {name: each.clone() for name, each in named.items()}
        home = home_of(context) / "paths" / shared.name / path_called(mine) / called(module)
        ticket, run = known.get(called(module)), shared.run_of(module)
        if ticket is None:
            begun_here = partial(Sync, wait_for=run.peers, on_ticket=partial(_say, called(module)))
        else:
            begun_here = partial(Sync, ticket=ticket)
        sync = begun_here(given, run, machine=Library(home=home, settings=settings))
        parts[module] = Part(sync, [*named.values()], [*given.values()])
    _train(shared, mine, flat, windows, parts, watch)
    best = flat.vector if watch.best is None else watch.best.vector
    written = replace(begun, config=shared.model, vector=best.cpu())
    ends = flat.vector.cpu()
    vectors = {module: cut(shared.model, ends, shared.cut.section_of(module)) for module in modules}
    write_trained(target, shared, mine, vectors, written.export)
    if watch.best is not None:
        tell(f"written as it was {watch.when}: held out {watch.best.loss:.4f} nats a token")
    tell(f"the path lies in {target}")  # what is printed are tickets alone: a file of them may be read again


@dataclass
class Watch:
    """Measures a path while it trains, and keeps what was best.

    Args:
        texts: its held-out documents; none: it is not measured.
        num_rounds: that its modules have made when it was measured last.
    """

    texts: "Sequence[Text]"
    best: "Best | None" = None
    num_rounds: int = -1

    def look(self, flat: "FlatModel", num_rounds: int) -> None:
        """
        Raises:
            NotFinite: the path has diverged.
        """
        from weft.compose.paths.stopping import better, heldout_loss
        from weft.model.transformer import Transformer

        self.num_rounds = num_rounds
        if not self.texts:
            return
        assert isinstance(flat.module, Transformer)
        loss, before = heldout_loss(flat.module, self.texts), self.best
        self.best = better(before, loss, num_rounds, flat.vector)
        if before is None:
            said = "" if not num_rounds else "; what this path was like before is not known here"
        else:
            said = "" if self.best is not before else f"; it was {before.loss:.4f} {self.when}"
        tell(f"after round {num_rounds}: held out {loss:.4f} nats a token{said}")

    @property
    def when(self) -> str:
        """Say when the path was best."""
        assert self.best is not None
        last = self.best.round == self.num_rounds
        return "at the end" if last else f"after round {self.best.round}" if self.best.round else "at the beginning"


def _train(
    shared: "SharedPaths",
    mine: "ModulePath",
    flat: "FlatModel",
    windows: "NDArray[Any]",
    parts: "Mapping[Module, Part]",
    watch: Watch,
) -> None:
    """Make a path's steps, each handed in to the run of each of its modules, until all of these are complete.

    Args:
        watch: told whenever all modules have made a round more, and at the end.
    """
    from weft.compose.paths.play import InnerStepsConfig, Steps
    from weft.compose.paths.training import HandingIn
    from weft.rng import stream
    from weft.sync.method.schedule import CosineConfig

    tokens, begun = shared.batch_size * shared.seq_len, shared.rounds_before * shared.steps
    num_steps = shared.rounds * shared.steps
    total = (shared.rounds_before + shared.rounds + shared.more_rounds) * shared.steps * tokens
    schedule = CosineConfig(lr=shared.lr, warmup_tokens=min(30 * tokens, total // 10), total_tokens=total)
    steps = Steps(InnerStepsConfig(every=1, batch_size=shared.batch_size, schedule=schedule), flat)
    weight, place = shared.weight(mine), shared.cut.number_of(mine)
    with ThreadPoolExecutor(len(parts)) as threads:
        runs = HandingIn(parts, threads, SystemClock())
        try:
            runs.start()
            within, before = 0, -1.0
            while not runs.is_over:
                # The rate falls with the module that is last: that one would go on with its outer momentum alone where
                # nothing is learnt any more. Modules are not equally far where a path of some was away for rounds.
                if (now := runs.progress) != before:
                    within, before = 0, now
                if (made := runs.num_rounds) > watch.num_rounds:
                    watch.look(flat, made)
                number = begun + min(round(now * num_steps) + within, num_steps - 1)
                with runs.step():
                    loss = steps.make(windows, 1, lambda at: stream(0, "paths", "batch", place, at), first=number)
                within += 1
                runs.hand_in(weight, loss)
            if (made := runs.last_round) > watch.num_rounds:  # else all were complete before
                watch.look(flat, made)
        except BaseException as error:
            runs.close(error)
            raise


def _tensor(flat: "FlatModel", name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return getattr(flat.module.get_submodule(owner), leaf).data


def _say(module: str, ticket: str) -> None:
    typer.echo(f"{module} {ticket}")


def _given(data: Sequence[str], heldout: float, router_share: float, seed: int) -> "Documents":
    """Return documents that have text: to train on, held out, and kept apart for routers.

    Raises:
        ConfigError: too few.
    """
    from weft.compose.experts.split import sided
    from weft.compose.paths.dealing import Documents
    from weft.compose.paths.resharding import apart

    sides = [(side, each) for side, each in sided(own_source(list(data)), Path.cwd(), heldout) if each.text.strip()]
    train, held = ([each for side, each in sides if side == wanted] for wanted in ("train", "heldout"))
    if not train:
        raise ConfigError(
            "--data: nothing is left to train on: documents are blank, or all of their text is held out. Give more."
        )
    if not router_share:
        return Documents(train, held, ())
    of_router, of_paths = apart(len(train), router_share, seed)
    return Documents([train[at] for at in of_paths.tolist()], held, [train[at] for at in of_router.tolist()])


def _levels(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in given.split(","))
    except ValueError:
        raise ConfigError(f"--levels {given[:80]}: numbers with commas between, such as 2,2 or 4,4.") from None


def _tickets(file: Path) -> dict[str, str]:
    """
    Raises:
        ConfigError: the file cannot be read, or a line is no module and ticket.
    """
    try:
        lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tickets {file}: {error}.") from None
    found = {}
    for line in lines:
        if (match := _TICKET.match(line)) is None:
            raise ConfigError(f"--tickets {file}: {line[:60]!r} is no module and its ticket, such as `0.1 weft2...`.")
        found[match[1]] = match[2]
    return found


def _heldout(folder: Path, mine: "ModulePath", shared: "SharedPaths", words: "Tokenizer") -> "list[Text]":
    """Return a path's held-out documents, as far as a sample goes: at most so many, spread evenly."""
    from weft.compose.paths.dealing import read_lines
    from weft.compose.paths.folder import shard_of

    found = read_lines(folder / shard_of(mine, is_heldout=True))
    texts = [words.encode(each.text)[: shared.seq_len + 1] for each in found[:: max(1, -(-len(found) // MOST_HELDOUT))]]
    return [each for each in texts if len(each) > 1]  # of one token nothing is predicted


def _windows(folder: Path, mine: "ModulePath", shared: "SharedPaths", words: "Tokenizer") -> "NDArray[Any]":
    """Return a path's documents as samples, one after the other.

    Raises:
        ConfigError: they are not all there, or too few.
    """
    import numpy as np

    from weft.compose.paths.dealing import read_lines, tokens_of
    from weft.compose.paths.folder import RECORD, shard_of

    file, num, size = folder / shard_of(mine), shared.documents[shared.cut.number_of(mine)], shared.seq_len + 1
    found = read_lines(file)
    if len(found) != num:
        raise ConfigError(f"{file}: {several(len(found), 'document')}, and {RECORD} names {num:,}. Copy it again.")
    ids = np.concatenate([tokens_of(words, each) for each in found])
    if len(ids) < size:
        raise ConfigError(f"{file}: {len(ids):,} tokens, and a sample takes {size}. Give more documents.")
    return ids[: len(ids) // size * size].reshape(-1, size)
