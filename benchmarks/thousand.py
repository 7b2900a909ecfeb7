"""What membership, voting and payloads cost each peer of a run of 100, 300 and 1,000.

    python -m benchmarks.thousand            # all sizes; `python -m benchmarks.thousand 100` that one

Production peers over the memory transport, on a virtual clock, with the cost model in place of torch: an electorate of
16, and everybody else in a group of one of them. All come within twenty seconds, most of them to a run that has begun.
Bytes are counted by the kind of what is sent, over twenty rounds, once everybody is counted.
"""

import asyncio
import gc
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from benchmarks.report import load, load_line, table, write
from weft.clock import Clock
from weft.codec import Fp32Config
from weft.data import CorpusConfig, TextSource
from weft.events import RoundCommitted
from weft.ids import PeerId
from weft.net.blobs import inline
from weft.net.claims import ClaimReader
from weft.net.handshake import Passport
from weft.net.memory import MemoryNetwork
from weft.net.messages import (
    Acquaint,
    Answering,
    Farewell,
    Heartbeat,
    LinkUse,
    News,
    Probing,
    Reached,
    ReachPlease,
    ViewList,
    ViewSums,
)
from weft.net.node import Node
from weft.peer.config import RunFile, ShapedModel, TrainConfig
from weft.peer.home import Home
from weft.peer.seal import seal
from weft.sim.cost import CostTrainer
from weft.sim.world import Life, Member, Paced, World
from weft.sync.method import FedAvgConfig
from weft.sync.schedule import ConstantConfig
from weft.wire import encode

SIZES = (100, 300, 1000)
ELECTORS = 16
NUM_ROUNDS = 20
SEQ_LEN, BATCH, EVERY = 16, 2, 2
TRAIN_S = 2.0  # of a round
FILL_S = 20.0
SETTLE_S = 25.0  # until all are in a group, and links of newcomers are closed that nobody needs
DELAY_S, JITTER_S = 0.03, 0.03
LONGEST_S = 3600.0

MEMBERSHIP = {
    kind.__name__
    for kind in (
        Acquaint,
        Answering,
        Farewell,
        Heartbeat,
        LinkUse,
        News,
        Probing,
        Reached,
        ReachPlease,
        ViewList,
        ViewSums,
    )
}


class CountedNode(Node):
    """A node that counts what it sends, by kind."""

    sent: Counter[str]
    _last: tuple[msgspec.Struct | None, int] = (None, 0)

    def post(self, peer: PeerId, record: msgspec.Struct) -> bool:
        is_sent = super().post(peer, record)
        if is_sent:
            if self._last[0] is not record:
                self._last = record, len(encode(record))
            kind = type(record).__name__
            self.sent["membership" if kind in MEMBERSHIP else "voting"] += self._last[1]
        return is_sent


class Crowd(World):
    """A world whose peers know a few that came before them."""

    def make_node(self, life: Life, passport: Passport, clock: Clock) -> Node:
        node = CountedNode(passport, [self.network.transport(life.member.id)], clock, life.emit, offload=inline)
        node.sent = Counter()
        return node

    def known_to(self, member: Member) -> list[Member]:
        others = [other for other in self.members.values() if other is not member and other.lives]
        number = len(others)
        return others[:1] + [others[place] for place in sorted({number * 7919 % number, number // 2})] if others else []


@dataclass
class Figures:
    num: int
    wall_s: float = 0.0
    virtual_s: float = 0.0
    round_s: float = 0.0
    counted: float = 0.0  # peers, of all, in the rounds measured
    most_wards: int = 0
    most_mib: float = 0.0
    sent: dict[str, dict[str, float]] = field(default_factory=dict)  # role -> kind -> bytes per peer and second
    links: dict[str, float] = field(default_factory=dict)


def run_file(root: Path, num: int) -> RunFile:
    path = root / "corpus.txt"
    path.write_text("\n".join(f"line {number} of a text that nobody will read" for number in range(3000)))
    return RunFile(
        name="thousand",
        seed=1,
        electors=ELECTORS,
        has_even_leases=True,
        model=ShapedModel(num_layers=1, num_heads=2, width=16, ffn_width=16),
        data=CorpusConfig(source=TextSource(paths=(str(path),))),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=1000 * num * BATCH * SEQ_LEN * EVERY,
            schedule=ConstantConfig(lr=1e-2),
            evaluate_every=0,
            evaluate_windows=1,
        ),
        method=FedAvgConfig(every=EVERY, codec=Fp32Config()),
    )


def play(num: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        home = Home(root / "home")
        sealed = seal(run_file(root, num), root, home, lambda _event: None)
        world = Crowd(sealed, home, MemoryNetwork(delay_s=DELAY_S, jitter_s=JITTER_S), seed=1)
        world.make_trainer = CostTrainer
        world.reader = ClaimReader(sealed.config.run)
        figures, began = Figures(num), time.perf_counter()
        world.clock.run(_play(world, figures))
        figures.wall_s = time.perf_counter() - began
        figures.most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return figures


async def _play(world: Crowd, figures: Figures) -> None:
    num, began = figures.num, time.perf_counter()
    members = [world.member(f"peer-{number}") for number in range(num)]
    members[0].is_founder = True
    for member in members:
        member.tokens_per_s = BATCH * SEQ_LEN * EVERY / TRAIN_S
        world.launch(member, wait_for=ELECTORS, compute=Paced(member))
        await asyncio.sleep(FILL_S / num)
    await asyncio.sleep(SETTLE_S)
    async with asyncio.timeout(LONGEST_S):
        while _num_placed(members) < num:
            print(f"{_num_placed(members)} of {num} have a place after {world.clock.now():.0f} s", flush=True)
            await asyncio.sleep(10.0)
        print(f"all {num} have a place after {time.perf_counter() - began:.0f} s of wall time", flush=True)
        first = await world.when(members[0], RoundCommitted)
        began_s, before = world.clock.now(), {member: _sent(member) for member in members}
        last = await world.round(members[0], first.round + NUM_ROUNDS)
    took_s = world.clock.now() - began_s
    figures.virtual_s, figures.round_s = world.clock.now(), took_s / NUM_ROUNDS
    commits = [event for event in members[0].life.committed if first.round < event.round <= last.round]
    figures.counted = sum(len(event.contributors) + event.num_through for event in commits) / len(commits) / num
    head = members[0].peer.head
    assert head is not None
    electors = [member for member in members if member.id in head.members]
    wards = [member for member in members if member.id not in head.members]
    figures.most_wards = max(len(member.peer._groups._sponsor.wards) for member in electors)
    for role, of_role in {"elector": electors, "ward": wards, "mean of all": members}.items():
        spent = Counter[str]()
        for member in of_role:
            spent.update({kind: num - before[member][kind] for kind, num in _sent(member).items()})
        figures.sent[role] = {kind: num / len(of_role) / took_s for kind, num in spent.items()}
        figures.links[role] = sum(len(member.peer.place.node.peers) for member in of_role) / len(of_role)
    await world.end()


def _num_placed(members: list[Member]) -> int:
    heads = [member.peer.head for member in members if member.peer is not None and member.peer._groups is not None]
    return len(heads) - sum(
        member.peer._groups.is_outside
        for member in members
        if member.peer is not None and member.peer._groups is not None
    )


def _sent(member: Member) -> Counter[str]:
    node = member.peer.place.node
    assert isinstance(node, CountedNode)
    sent = Counter(node.sent)
    total = sum(meter.sent_nbytes for meter in node.traffic.values())
    sent["payloads and the rest"] = total - sent["membership"] - sent["voting"]
    return sent


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    torch.set_num_threads(1)
    gc.set_threshold(200_000, 20, 50)
    before, played = load(), []
    for num in sizes:
        figures = play(num)
        print(figures, flush=True)
        played.append(figures)
        _report(before, played)  # again with each: the last takes many times as long as those before


def _report(before: float | None, played: list[Figures]) -> None:
    kinds = ("membership", "voting", "payloads and the rest")
    rows = [
        (
            figures.num,
            role,
            f"{figures.links[role]:.1f}",
            *(f"{figures.sent[role][kind]:.0f}" for kind in kinds),
        )
        for figures in played
        for role in figures.sent
    ]
    runs = [
        (
            figures.num,
            figures.most_wards,
            f"{100 * figures.counted:.1f} %",
            f"{figures.round_s:.2f}",
            f"{figures.virtual_s:.0f}",
            f"{figures.wall_s:.0f}",
            f"{figures.most_mib:.0f}",
        )
        for figures in played
    ]
    flat = []
    for kind in kinds[:2]:
        found = [figures.sent["mean of all"][kind] for figures in played]
        flat.append(
            f"Bytes of {kind} per peer and second, from {played[0].num} to {played[-1].num:,} peers: "
            f"{100 * (found[-1] / found[0] - 1):+.0f} %."
        )
    sections = [
        load_line(before),
        f"An electorate of {ELECTORS}; links of {1000 * DELAY_S:g} ms one way and up to {1000 * JITTER_S:g} ms jitter; "
        f"{TRAIN_S:g} s of training in a round. Signed claims of membership are checked once for all peers of the "
        "process; all else each peer does for itself.",
        table(
            (
                "peers",
                "most wards of one",
                "counted in a round",
                "s per round",
                "virtual s",
                "wall s of the simulation",
                "MiB, most",
            ),
            runs,
        ),
        f"Bytes that each sends per second, over {NUM_ROUNDS} rounds, in frames without the transport's own overhead. "
        "Voting is all that rounds say but blobs: letters, decisions, offers, records. The vector is tiny: payloads "
        "and results grow with it, the other two do not.",
        table(("peers", "who", "links, mean", *kinds), rows),
        *flat,
    ]
    command = " ".join(["python -m benchmarks.thousand", *(str(figures.num) for figures in played)])
    write("thousand", "Groups: what hundreds of peers cost each", command, sections)


if __name__ == "__main__":
    main()
