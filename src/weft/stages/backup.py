"""A stage that one machine holds has its state kept by another: should that machine vanish, the stage is restored.

    a stage with one member, or all on one machine ─► the lowest ready peer of the next stage keeps it
    every `checkpoint_every_s` ─► the backup fetches the newest state into its stage-<n>/checkpoint, if there is a newer

    it is stopped ─► it computes no more, and has the backup fetch what it holds, before it says goodbye

Who keeps what is a function of what all are told (`backups`), so nobody asks anybody. The copy is a checkpoint of the
stage's run without anything private: whoever goes on from it is a newcomer with that state. A peer fetches one
section's state in an interval, whatever it keeps: what is oldest first. So a copy that was kept for others is told from
what this peer held itself (`StagesOnDisk`).

Failure:
- the member vanishes meanwhile, or cannot deliver: the copy of before stays, and the next interval tries again.
- no room on the disk: a notice, once; the stage goes without a copy.
- two peers are told different things for a moment: both keep the stage, or neither does, until the next interval.
"""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress

import numpy as np
import torch

from weft.errors import CheckpointError, DiskFull, NetError, PeerError, Refused
from weft.events import CheckpointSaved, Notice
from weft.ids import PeerId
from weft.net.transport.address import hosts_of, is_loopback
from weft.peer.state.checkpoint import Contents, Snapshot, read_contents, save
from weft.stages.messages import KeepNow, KeptAnswer
from weft.stages.reader import StageReader, shape
from weft.stages.step.pipeline import Kit
from weft.stages.table import StageTable
from weft.store.home import CHECKPOINT_FILE, PeerFolder
from weft.store.journal import Votes
from weft.store.pool import Pool
from weft.sync.records.messages import Base, Manifest
from weft.wire import Buffer, digest_of

HAND_OVER_S = 120.0  # for the state of a stage to be fetched by another before who holds it goes
SINCE = 1 << 41  # as of a `StageReader`: no number of another of this process


class StagesOnDisk:
    """Which stages' states lie on this machine's disk, of which rounds; what has changed is read again.

    Args:
        folder: of one peer and the whole run.
    """

    def __init__(self, folder: PeerFolder) -> None:
        self._folder = folder
        self._read: dict[int, tuple[int, Contents]] = {}  # when it was written, and what it says

    @property
    def rounds(self) -> dict[int, int]:
        """Return the rounds of all states that are kept, by stage."""
        return {stage: _round(contents) for stage, contents in self._contents().items()}

    @property
    def own(self) -> dict[int, int]:
        """Return those of the states that this peer held itself."""
        return {stage: _round(contents) for stage, contents in self._contents().items() if not is_copy(contents)}

    def voted(self) -> dict[int, Base]:
        """Return the rounds in which this peer voted last, by stage: not of those that it left in order."""
        found = {}
        for stage in self._folder.voted_stages:
            with suppress(CheckpointError):  # damaged: it votes nowhere before another round is over
                last = Votes(self._folder.stage(stage).durable).read()
                if last is not None and not last.has_left:
                    found[stage] = last.base
        return found

    def has_counted(self, num_tokens: int) -> bool:
        """Return whether so much is trained, as a state that this peer held has it."""
        own = [contents.head for contents in self._contents().values() if not is_copy(contents)]
        return any(head is not None and head.committed_tokens >= num_tokens for head in own)

    def with_held(self, heads: Mapping[int, Manifest | None]) -> dict[int, int]:
        """Return the rounds of all that is kept; of stages that are held now, how far they are.

        Args:
            heads: of the states that are held.
        """
        found = self.rounds
        return found | {stage: int(head.round) for stage, head in heads.items() if head is not None and stage in found}

    def _contents(self) -> dict[int, Contents]:
        found = {}
        for stage in self._folder.stages:
            folder = self._folder.stage(stage).checkpoint
            with suppress(CheckpointError, OSError):  # half-written, or gone
                changed_at = (folder / CHECKPOINT_FILE).stat().st_mtime_ns
                before = self._read.get(stage)
                if before is None or before[0] != changed_at:
                    before = self._read[stage] = changed_at, read_contents(folder)
                found[stage] = before[1]
        return found


def is_copy(contents: Contents) -> bool:
    """Return whether a checkpoint of a stage was kept for others: not even how far its peer had come is in it."""
    return not contents.counters


def _round(contents: Contents) -> int:
    return 0 if contents.head is None else int(contents.head.round)


class Backup:
    """Of one peer.

    Args:
        table: who holds what, kept up by whoever hears it.
    """

    def __init__(self, kit: Kit, table: StageTable) -> None:
        self.kept: dict[int, int] = {}  # rounds of what this process has fetched, by stage
        self._kit = kit
        self._table = table
        self._readers: dict[int, StageReader] = {}
        self._is_full_told = False
        self._fetching = asyncio.Lock()  # one state at a time: each takes memory
        kit.node.serve(KeepNow, self._on_keep_now)

    async def hand_over(self, stage: int, backup: PeerId) -> bool:
        """Have another keep what this peer alone holds, as it is now; return whether it does."""
        answer = await self._kit.node.ask(backup, KeepNow(stage=stage), KeptAnswer, deadline_s=HAND_OVER_S)
        return answer is not None and answer.is_kept

    def backups_of(self, stages: Collection[int]) -> dict[int, PeerId]:
        """Return who is to keep the state of those of some stages that nobody but this peer holds."""
        found, me = backups(self._table, self._hosts()), {self._kit.node.peer}
        return {stage: found[stage] for stage in stages if stage in found and self._table.held(stage).keys() == me}

    async def watch(self) -> None:
        """Keep what is this peer's to keep, until this is cancelled."""
        every_s = self._kit.settings.checkpoint_every_s
        while every_s:
            await asyncio.sleep(every_s)
            for stage in self._due():
                ready = sorted(peer for peer in self._table.ready(stage) if self._kit.node.is_linked(peer))
                if await self._keep(stage, ready):
                    break

    def _due(self) -> list[int]:
        """Return the stages to keep, the oldest copy first."""
        me = self._kit.node.peer
        mine = [stage for stage, peer in backups(self._table, self._hosts()).items() if peer == me]
        return sorted(mine, key=lambda stage: (self.kept.get(stage, -1), stage))

    def _hosts(self) -> dict[PeerId, frozenset[str]]:
        node = self._kit.node
        return {peer: frozenset(_hosts(node.contact(peer).addresses)) for peer in self._table.peers}

    async def _on_keep_now(self, peer: PeerId, request: KeepNow) -> KeptAnswer:
        is_wanted = self._kit.settings.checkpoint_every_s > 0  # else this machine keeps nothing
        held = self._table.held(request.stage).get(peer)
        if not is_wanted or held is None or self._is_held(request.stage):
            return KeptAnswer(is_kept=False)
        await self._keep(request.stage, [peer])
        return KeptAnswer(is_kept=self.kept.get(request.stage, -1) >= held.round)

    def _is_held(self, stage: int) -> bool:
        return self._kit.node.peer in self._table.held(stage)

    async def _keep(self, stage: int, members: list[PeerId]) -> bool:
        """Fetch the newest state of a stage from its members; return whether there was one to fetch."""
        kit = self._kit
        async with self._fetching:
            if stage not in self._readers:
                self._readers[stage] = StageReader(kit.node, kit.run.of_stage(stage), SINCE, kit.compute, kit.clock)
            reader = self._readers[stage]
            heads = await reader.heads(members)
            if max((head.round for head in heads.values()), default=-1) <= self.kept.get(stage, -1):
                return False
            try:
                await self._fetch(stage, reader, members)
            except (PeerError, NetError, Refused):
                pass  # the next interval tries again
            except (DiskFull, CheckpointError) as error:
                if not self._is_full_told:
                    what = kit.run.called(stage)
                    text = f"cannot back up the state of {what} here, and only one machine holds it: {error}"
                    kit.emit(Notice(text=text))
                self._is_full_told = True
            return True

    async def _fetch(self, stage: int, reader: StageReader, members: list[PeerId]) -> None:
        kit = self._kit
        offered = await reader.pin(members)
        memory = Pool(0, kit.folder.scratch)
        vectors = await kit.compute.serve(lambda: {name: memory.empty(num) for name, num in shape(reader.run).items()})

        def put(name: str, start: int, data: Buffer) -> None:
            values = torch.from_numpy(np.frombuffer(data, dtype="<f4"))
            vectors[name][start : start + values.numel()] = values

        await reader.pull(offered, tuple(vectors), put, kit.emit)
        if self._is_held(stage):
            return  # it was taken up meanwhile
        snapshot = Snapshot(
            config=reader.run,
            tokenizer=kit.data.tokenizer.to_bytes(),
            came_with=kit.data.came_with,
            head=offered.head,
            charter=offered.charter,
            replicated=vectors,
        )
        path = kit.folder.stage(stage).checkpoint
        written = (await kit.compute.serve(lambda: save(path, snapshot))).replicated
        self.kept[stage] = int(offered.head.round)
        kit.emit(
            CheckpointSaved(path=str(path), round=offered.head.round, digest=digest_of(written), nbytes=written.nbytes)
        )


def backups(table: StageTable, hosts: Mapping[PeerId, Collection[str]]) -> dict[int, PeerId]:
    """Return who keeps the state of each stage that should be kept.

    Those are stages with one ready member, or whose members are all on one machine, by the hosts of their addresses.
    The lowest ready peer of the next stage that has any beside those members keeps it: of another machine, where there
    is one.
    """
    found = {}
    for stage in range(table.num_pieces):
        members = sorted(table.ready(stage))
        if not members or not _are_one_machine(members, hosts):
            continue
        others = [
            peer
            for step in range(1, table.num_stages)
            for peer in sorted(table.ready((stage + step) % table.num_stages))
            if peer not in table.held(stage)
        ]
        apart = [peer for peer in others if not _are_one_machine([members[0], peer], hosts)]
        if others:
            found[stage] = (apart or others)[0]
    return found


def _are_one_machine(peers: Collection[PeerId], hosts: Mapping[PeerId, Collection[str]]) -> bool:
    """Return whether each shares a host with the first; of peers without addresses nobody knows."""
    first, *others = peers
    return all(set(hosts.get(peer, ())) & set(hosts.get(first, ())) for peer in others)


def _hosts(addresses: Collection[str]) -> set[str]:
    """Return the hosts that tell a machine from others: all have 127.0.0.1, some have nothing else."""
    found = {host for address in addresses for host in hosts_of(address)}
    return {host for host in found if not is_loopback(host)} or found
