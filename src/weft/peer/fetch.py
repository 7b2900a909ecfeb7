"""What a newcomer fetches: the run's config, its data and tokenizer, and the state of its members.

Everything is a blob named by a digest that the ticket, the config or a manifest gives, so any member may deliver it and
none can alter it. It does not know when to join, nor how a round works.

Failure:
- a donor that vanishes or lies: the next one is asked.
- a donor that forgot the pinned state: the newcomer asks for a newer one.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from torch import Tensor

from weft.clock import Clock
from weft.data import DataIndex, Tokenizer, check_vocabulary, from_bytes
from weft.errors import DeadlineExceeded, GenesisMismatch, NetError, PeerError, Refused, WireError
from weft.events import DataReady, Emit, StateJoined
from weft.ids import Digest, PeerId, short
from weft.net.node import Node
from weft.peer.config import RunConfig
from weft.peer.home import Home
from weft.peer.messages import StateOffer
from weft.peer.seal import MAX_RUN_NBYTES, MAX_TOKENIZER_NBYTES, read_run
from weft.peer.state import StateIndex, chunks
from weft.sync.charter import Charter
from weft.sync.messages import Manifest
from weft.wire import decode, digest_of

MAX_INDEX_NBYTES = 64 << 20  # of a state's digests: 64 hex digits per MiB of state
PARALLEL = 4  # blobs on their way at a time, over several donors
CHUNK_S = 120.0  # for 1 MiB beside three more: who is slower than 300 kbit/s never catches up


async def fetch_run(node: Node, peers: Sequence[PeerId], home: Home, max_parameters: int) -> RunConfig:
    """Return the run's config from a member, once its digest is the run's name.

    Raises:
        PeerError: nobody delivered it.
        ConfigError: it is malformed, or of another format.
        TooLarge: its model has more than `max_parameters`.
    """
    data = home.blobs.read(Digest(node.run), MAX_RUN_NBYTES)
    if data is None:
        data = await _small(node, peers, Digest(node.run), MAX_RUN_NBYTES)
    run = read_run(data, max_parameters)
    if run.run != node.run:
        raise GenesisMismatch(f"the config is of run {run.run}, the ticket of run {node.run}. Ask for a fresh ticket.")
    home.blobs.put(data)
    return run


async def fetch_files(node: Node, peers: Sequence[PeerId], run: RunConfig, home: Home, emit: Emit) -> Tokenizer:
    """Fetch what is missing of the run's shards, tokenizer and initial vector; return the tokenizer.

    Raises:
        PeerError: nobody delivered one of them.
        TokenizerMismatch: the tokenizer is not the model's.
        DiskFull: no room.
    """
    blob = home.blobs.read(run.data.tokenizer, MAX_TOKENIZER_NBYTES)
    if blob is None:
        blob = await _small(node, peers, run.data.tokenizer, MAX_TOKENIZER_NBYTES)
        home.blobs.put(blob)
    tokenizer = from_bytes(blob)
    check_vocabulary(tokenizer, run.model.vocab_size)
    missing = home.shards.missing(run.data)
    gate = asyncio.Semaphore(PARALLEL)

    async def shard(number: int, digest: Digest, nbytes: int) -> None:
        async with gate:
            data = await node.fetch_any(_turned(peers, number), digest, nbytes)
            home.shards.add(run.data, digest, data)

    await _all(shard(number, info.digest, info.nbytes) for number, info in enumerate(missing))
    emit(_data_ready(run.data, sum(info.nbytes for info in missing)))
    return tokenizer


async def fetch_initial(node: Node, peers: Sequence[PeerId], run: RunConfig, num: int, home: Home) -> None:
    """Fetch the initial vector into the home where it does not follow from the seed and is not there."""
    if not run.is_seeded and home.blobs.open(run.initial) is None:
        home.blobs.put(await node.fetch_any(peers, run.initial, 4 * num))


async def fetch_state(
    node: Node, donor: PeerId, offer: StateOffer, into: dict[str, Tensor], clock: Clock, emit: Emit
) -> tuple[Manifest, Charter]:
    """Fill the vectors of `into` with an offered state; return the manifest it belongs to, and what holds after it.

    Raises:
        PeerError: the donor did not deliver, or offers another state than this run's.
    """
    if offer.head is None or offer.index is None or offer.charter is None:
        raise PeerError("the run has not begun: there is no state to fetch")
    if digest_of(offer.charter) != offer.head.charter:
        raise WireError("the offered state comes with another charter than its manifest names")
    began = clock.now()
    index = decode(
        await node.fetch_small(donor, offer.index, MAX_INDEX_NBYTES), StateIndex, max_nbytes=MAX_INDEX_NBYTES
    )
    wanted = {each.name: each for each in index.vectors}
    if set(wanted) != set(into) or any(wanted[name].num != vector.numel() for name, vector in into.items()):
        raise WireError("the offered state has other vectors than this run's model")
    gate = asyncio.Semaphore(PARALLEL)

    async def chunk(digest: Digest, place: memoryview) -> None:
        async with gate:
            try:
                async with asyncio.timeout(CHUNK_S):
                    await node.fetch(donor, digest, place)
            except TimeoutError:
                raise DeadlineExceeded(f"{short(donor)} did not deliver a chunk within {CHUNK_S:g} s") from None

    await _all(
        chunk(digest, place)
        for name, vector in into.items()
        for digest, place in zip(wanted[name].chunks, chunks(vector), strict=True)
    )
    nbytes = sum(4 * vector.numel() for vector in into.values())
    emit(StateJoined(round=offer.head.round, nbytes=nbytes, duration_s=clock.now() - began, donors=(donor,)))
    return offer.head, offer.charter


def _data_ready(index: DataIndex, fetched_nbytes: int) -> DataReady:
    return DataReady(
        num_shards=len(index.train) + len(index.heldout),
        fetched_nbytes=fetched_nbytes,
        train_tokens=index.num_tokens("train"),
        heldout_tokens=index.num_tokens("heldout"),
    )


async def _small(node: Node, peers: Sequence[PeerId], digest: Digest, max_nbytes: int) -> bytes:
    failures = []
    for peer in peers:
        try:
            return await node.fetch_small(peer, digest, max_nbytes)
        except (PeerError, NetError, Refused) as error:
            failures.append(str(error))
    raise PeerError(f"nobody delivered {digest[:8]}: {'; '.join(failures) or 'nobody is connected'}")


def _turned(peers: Sequence[PeerId], number: int) -> list[PeerId]:
    start = number % len(peers) if peers else 0
    return [*peers[start:], *peers[:start]]


async def _all(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run jobs together; the first that fails ends the others, and its error is raised.

    A `TaskGroup` of Python 3.11 or 3.12 forgets that it was cancelled where a job fails at the same moment.
    """
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
