"""What a newcomer fetches before it takes part: the run's config, its data, tokenizer and first weights.

Everything is a blob named by a digest that the ticket or the config gives, so any member may deliver it and none can
alter it. Shards come from all members at once, and each is on disk once it has come: a shard is a few megabytes, so
whole ones are what an interruption leaves, and what is fetched again of one is little.

Failure:
- a member that vanishes or lies: the others deliver, those too that were met or named since the first let this peer in.
- this process ends: the next one fetches what is missing.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtyping import Float32
from msgspec import UNSET
from torch import Tensor

from weft.clock import Clock
from weft.data.store import DataIndex
from weft.data.tokenizer import Tokenizer, check_vocabulary, from_bytes
from weft.errors import ConfigError, GenesisMismatch, PeerError, WireError
from weft.events import Emit
from weft.ids import Digest, PeerId, short
from weft.launch.code import recall
from weft.model.came_with import MAX_BLOB_NBYTES, decode
from weft.model.config import ModelConfig, plain
from weft.model.flat import base_layout, cut, ends_within, layers_within, layout
from weft.model.sections import Section, whole
from weft.model.weights import read_folder
from weft.net.multi_source import Blob, everybody, pull, small_from
from weft.net.node import Node
from weft.progress import Meter
from weft.run.config import Genesis, RunConfig
from weft.run.frozen import codec_of_base
from weft.run.genesis import MAX_RUN_NBYTES, MAX_TOKENIZER_NBYTES, drawn_adapter, read_run
from weft.run.outline import data_ready
from weft.run.staged import StagedConfig, by_section
from weft.store.chunks import raw
from weft.store.home import Home
from weft.sync.merge.reduce import require
from weft.wire import Buffer, digest


async def fetch_run(node: Node, peers: Sequence[PeerId], home: Home, max_parameters: int) -> Genesis:
    """Return the run's config from a member, once its digest is the run's name.

    Raises:
        PeerError: nobody delivered it.
        ConfigError: it is malformed, of another format, or computes with what this process does not know.
        TooLarge: its model has more than `max_parameters`.
    """
    data = home.blobs.read(Digest(node.run), MAX_RUN_NBYTES)
    if data is None:
        data = await small_from(node, everybody(node, peers), Digest(node.run), MAX_RUN_NBYTES)
    run = read_run(data, max_parameters)
    if run.run != node.run:
        raise GenesisMismatch(f"the config is of run {run.run}, the ticket of run {node.run}. Ask for a fresh ticket.")
    if isinstance(run, StagedConfig) and run.stage is not None:
        raise ConfigError("this run says that it is a stage of another. Ask its maker for another ticket.")
    recall(run, home)
    require(run.method)
    home.blobs.put(data)
    return run


async def fetch_files(
    node: Node, peers: Sequence[PeerId], run: RunConfig, home: Home, clock: Clock, emit: Emit
) -> Tokenizer:
    """Fetch what is missing of the run's shards, tokenizer and what came with its model; return the tokenizer.

    Raises:
        PeerError: nobody delivered one of them.
        TokenizerMismatch: the tokenizer is not the model's.
        ConfigError: what came with the model is nothing that an export may hand on.
        DiskFull: no room.
    """
    blob = home.blobs.read(run.data.tokenizer, MAX_TOKENIZER_NBYTES)
    if blob is None:
        blob = await small_from(node, everybody(node, peers), run.data.tokenizer, MAX_TOKENIZER_NBYTES)
        home.blobs.put(blob)
    tokenizer = from_bytes(blob)
    check_vocabulary(tokenizer, run.model.vocab_size)
    await _fetch_came_with(node, peers, run, home)
    emit(data_ready(run.data, await _fetch_shards(node, peers, run.data, home, clock, emit)))
    return tokenizer


async def _fetch_came_with(node: Node, peers: Sequence[PeerId], run: RunConfig, home: Home) -> None:
    if run.came_with is UNSET:
        return
    blob = home.blobs.read(run.came_with, MAX_BLOB_NBYTES)
    if blob is None:
        blob = await small_from(node, everybody(node, peers), run.came_with, MAX_BLOB_NBYTES)
    try:
        decode(blob)
    except WireError as error:
        raise ConfigError(f"this run cannot be joined: {error}. Tell its maker.") from None
    home.blobs.put(blob)


def read_came_with(run: RunConfig, home: Home) -> bytes:
    """Return the blob of what came with the run's model; empty where nothing did, or it is not here."""
    return b"" if run.came_with is UNSET else home.blobs.read(run.came_with, MAX_BLOB_NBYTES) or b""


async def _fetch_shards(
    node: Node, peers: Sequence[PeerId], index: DataIndex, home: Home, clock: Clock, emit: Emit
) -> int:
    """Fetch missing shards, again and again as long as some come; return how many bytes there were to fetch."""

    async def keep(shard: Blob, data: Buffer) -> None:
        await asyncio.to_thread(home.shards.add, index, shard.digest, data)
        meter.add(len(data))

    missing = home.shards.missing(index)
    nbytes = sum(info.nbytes for info in missing)
    with Meter("fetching the data", "B", emit, clock, nbytes) as meter:
        while missing:
            before = len(missing)
            blobs = [Blob(digest=info.digest, nbytes=info.nbytes) for info in missing]
            try:
                await pull(node, blobs, everybody(node, peers), keep, clock)
            except PeerError:
                if len(home.shards.missing(index)) == before:
                    raise
            missing = home.shards.missing(index)
    return nbytes


def take_model(run: Genesis, folder: Path, home: Home) -> None:
    """Put the weights that a run begins with, or that its adapter goes beside, into the home: from a model's folder.

    Raises:
        ConfigError: the run has none, or the folder holds others, or no model.
        DiskFull: no room.
    """
    if not isinstance(run, RunConfig) or run.is_seeded:
        raise ConfigError(
            "--model: of this run nothing is taken from a folder: it begins with weights that weft makes from its "
            "seed. Leave it out."
        )
    runs = by_section(run)
    wanted = [due for each in runs for due in _first(each)]
    if all(home.blobs.open(each) is not None for each in wanted):
        return
    config, vector = read_folder(folder)
    if run.model.has_frozen_ends and layout(config) != layout(plain(run.model)):
        raise ConfigError(f"--model {folder}: its layers are of another shape than the run's. Leave it out.")
    for each in runs:
        section = each.section if isinstance(each, StagedConfig) else None
        for due, data in zip(_first(each), _of_folder(each, config, vector, section), strict=True):
            if (found := digest(data)) != due:
                raise ConfigError(
                    f"--model {folder}: its weights are not those that the run began with ({short(found)}, and "
                    f"{short(due)} is due). Leave it out, and members send them."
                )
            home.blobs.put(data)


def _first(run: RunConfig) -> list[Digest]:
    """Return what of a run's first weights a folder has: of an adapter, what that goes beside."""
    base = [] if run.base is UNSET else [Digest(run.base)]
    return base if run.model.adapter is not UNSET else [Digest(run.initial), *base]


def _of_folder(
    run: RunConfig, config: ModelConfig, vector: Float32[Tensor, " all"], section: Section | None
) -> Iterator[Buffer]:
    """Yield the same as bytes, of a folder's model."""
    if run.model.has_frozen_ends:
        layers, ends = layers_within(run.model, vector), ends_within(run.model, vector)
        here = section or whole(run.model)
        yield raw(cut(run.model, layers, here))
        yield codec_of_base(run).encode(cut(run.model, ends, here, base_layout))
        return
    part = vector if section is None else cut(config, vector, section)
    yield raw(part) if run.base is UNSET else codec_of_base(run).encode(part)


async def fetch_initial(node: Node, peers: Sequence[PeerId], run: Genesis, home: Home) -> None:
    """Fetch the initial vector into the home where it does not follow from the seed, and an adapter's base.

    What is there is not fetched: of a base, whoever has trained or founded a run on it has it.
    """
    if lacks_first_weights(run, home):
        home.blobs.put(await node.fetch_any(everybody(node, peers), run.initial, 4 * run.num_parameters))
    if isinstance(run, RunConfig):
        await fetch_base(node, peers, run, home)


def lacks_first_weights(run: Genesis, home: Home) -> bool:
    """Return whether the initial vector is not here, and does not follow from the seed."""
    return not run.is_seeded and home.blobs.open(run.initial) is None and drawn_adapter(run) is None


def missing_base_nbytes(run: Genesis, home: Home) -> int:
    """Return the bytes that are not in the home of what the run's adapter goes beside; as `fetch_base`."""
    return sum(nbytes for _, nbytes in _missing_bases(run, home))


async def fetch_base(node: Node, peers: Sequence[PeerId], run: RunConfig, home: Home) -> None:
    """Fetch into the home what is not there of what the run's adapter goes beside; of a run with stages, all of it."""
    for base, nbytes in _missing_bases(run, home):
        home.blobs.put(await node.fetch_any(everybody(node, peers), base, nbytes))


def _missing_bases(run: Genesis, home: Home) -> Iterator[tuple[Digest, int]]:
    for each in by_section(run) if isinstance(run, RunConfig) else ():
        if each.base and home.blobs.open(each.base) is None:
            yield each.base, each.held_base_nbytes
