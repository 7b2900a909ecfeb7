"""What membership, voting and payloads cost each peer of a run of 100, 300 and 1,000.

    python -m benchmarks.thousand            # all sizes; `python -m benchmarks.thousand 100` that one
    python -m benchmarks.thousand report     # writes the report anew from reports/thousand.json

Production peers over the memory transport, on a virtual clock, with the cost model in place of torch: an electorate of
16, and everybody else in a group of one of them. All come within twenty seconds, most of them to a run that has begun.
Bytes are counted by the kind of what is sent, over twenty rounds, once everybody is counted. What was found for other
sizes before is kept, and says of which commit it is.
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

from benchmarks.report import FOLDER, commit, load, table, write
from weft.clock import Clock
from weft.codec.config import Fp32Config
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import RoundCommitted
from weft.ids import Digest, PeerId
from weft.net.blobs.blobs import Lookup, inline
from weft.net.link.handshake import Passport
from weft.net.membership.gossip import ClaimReader
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
from weft.net.transport.memory import MemoryNetwork
from weft.peer.messages import Letter
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.genesis import seal
from weft.run.machine import PeerConfig
from weft.sim.cost import CostTrainer
from weft.sim.memo import shared
from weft.sim.world import Life, Member, Paced, World
from weft.store.home import Home
from weft.sync.method.presets import FedAvgConfig
from weft.sync.method.schedule import ConstantConfig
from weft.wire import Buffer, encode

SIZES = (100, 300, 1000)
ELECTORS = 16
NUM_ROUNDS = 20
CLASSES = ("membership", "voting", "payloads and the rest")
SEQ_LEN, BATCH, EVERY = 16, 2, 2
TRAIN_S = 2.0  # of a round
FILL_S = 20.0
SETTLE_S = 25.0  # until all are in a group, and links of newcomers are closed that nobody needs
DELAY_S, JITTER_S = 0.03, 0.03
LONGEST_S = 3600.0
TELL_S = 4.0
MOST_APART = 0.2  # the aim: so much what each sends may differ between sizes
SETTINGS = PeerConfig(device="cpu", micro_batch=BATCH, checkpoint_every_s=0.0)  # whose disk is not what is measured

FIGURES = FOLDER / "thousand.json"  # of each size, the last that was measured
LETTER_BLOBS = {"Handing": "certificates (blobs)", "Records": "records (blobs)"}  # by who serves them
HANDED_ON = tuple(LETTER_BLOBS.values())  # once to each leaf, in each round
WHY = """
The mean falls, for electors send ten times what leaves do and stay as many. A leaf sends more in larger groups because
more of what was decided goes from leaf to leaf: each leaf is sent one certificate and its group's record in a round,
and an elector sends them to two of its leaves, however many it has. So the leaves of a group of five send three of five
certificates, those of a group of sixty 58 of sixty. Certificates are as long in all sizes. What a leaf sends of them
has a bound, one in the mean and two at most, and is near it at 1,000 peers. A record has some 33 bytes for each leaf,
and grows until a group has its 64. Rounds take longer with more peers, so that bytes per second grow less than those
of a round; an elector's grow by its announcement, which holds the record, and by a word to each leaf (`HandOn`).
""".strip().replace("\n", " ")

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
    _last: tuple[msgspec.Struct | None, int, str] = (None, 0, "")

    def post(self, peer: PeerId, record: msgspec.Struct) -> bool:
        is_sent = super().post(peer, record)
        if is_sent:
            if self._last[0] is not record:
                self._last = record, len(encode(record)), kind_of(record)
            self.sent[self._last[2]] += self._last[1]
        return is_sent

    def serve_blobs(self, lookup: Lookup, *, is_patient: bool = False) -> None:
        kind = LETTER_BLOBS.get(type(getattr(lookup, "__self__", None)).__name__)

        def counted(peer: PeerId, wanted: Digest) -> Buffer | None:
            data = lookup(peer, wanted)
            if data is not None and kind is not None:
                self.sent[kind] += len(data)
            return data

        super().serve_blobs(counted, is_patient=is_patient)


def kind_of(record: msgspec.Struct) -> str:
    if isinstance(record, Letter):
        return str(msgspec.msgpack.decode(record.signed.body)["message"]["type"])
    kind = type(record).__name__
    return "membership" if kind in MEMBERSHIP else kind


class Crowd(World):
    """A world whose nodes count what they send."""

    def make_node(self, life: Life, passport: Passport, clock: Clock) -> Node:
        node = CountedNode(passport, [self.network.transport(life.member.id)], clock, life.emit, offload=inline)
        node.sent = Counter()
        return node


@dataclass
class Figures:
    num: int
    commit: str
    load: float | None = None  # before
    wall_s: float = 0.0
    cpu_s: float = 0.0
    fill_cpu_s: float = 0.0  # until all have a place
    virtual_s: float = 0.0
    round_s: float = 0.0
    counted: float = 0.0  # peers, of all, in the rounds measured
    most_leaves: int = 0
    most_mib: float = 0.0
    sent: dict[str, dict[str, float]] = field(default_factory=dict)  # role -> class -> bytes per peer and second
    letters: dict[str, dict[str, float]] = field(default_factory=dict)  # role -> kind of voting -> the same
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


def play(num: int, crowd: type[Crowd] = Crowd) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        home = Home(root / "home")
        sealed = seal(run_file(root, num), root, home, lambda _event: None)
        world = crowd(sealed, home, MemoryNetwork(delay_s=DELAY_S, jitter_s=JITTER_S), seed=1)
        world.make_trainer = CostTrainer
        world.reader = ClaimReader(sealed.config.run)
        figures, began, began_cpu = Figures(num, commit(), load()), time.perf_counter(), time.process_time()
        with shared():
            world.clock.run(_play(world, figures))
        figures.wall_s, figures.cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        figures.most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return figures


async def _play(world: Crowd, figures: Figures) -> None:
    num, began, began_cpu = figures.num, time.perf_counter(), time.process_time()
    members = [world.member(f"peer-{number}") for number in range(num)]
    members[0].is_founder = True
    telling = asyncio.ensure_future(_tell(world, members))
    for member in members:
        member.tokens_per_s = BATCH * SEQ_LEN * EVERY / TRAIN_S
        world.launch(member, wait_for=ELECTORS, compute=Paced(member), settings=SETTINGS)
        await asyncio.sleep(FILL_S / num)
    await asyncio.sleep(SETTLE_S)
    async with asyncio.timeout(LONGEST_S):
        while _num_placed(members) < num:
            print("not all have a place yet", flush=True)
            await asyncio.sleep(10.0)
        figures.fill_cpu_s = time.process_time() - began_cpu
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
    leaves = [member for member in members if member.id not in head.members]
    inside = [member.peer._in_rounds for member in electors]
    figures.most_leaves = max(len(each.groups.aggregator.leaves) for each in inside if each is not None)
    for role, of_role in {"elector": electors, "leaf": leaves, "mean of all": members}.items():
        spent = Counter[str]()
        for member in of_role:
            spent.update({kind: num - before[member][kind] for kind, num in _sent(member).items()})
        per_second = {kind: num / len(of_role) / took_s for kind, num in spent.items()}
        letters = {kind: nbytes for kind, nbytes in per_second.items() if kind not in (*CLASSES, "total")}
        figures.letters[role] = letters
        figures.sent[role] = {
            "membership": per_second["membership"],
            "voting": sum(letters.values()),
            "payloads and the rest": per_second["total"] - per_second["membership"] - sum(letters.values()),
        }
        figures.links[role] = sum(len(member.peer.context.node.peers) for member in of_role) / len(of_role)
    telling.cancel()
    await world.end()


async def _tell(world: Crowd, members: list[Member]) -> None:
    """Say how far it is, now and then: a thousand take an hour. Run until cancelled."""
    began = time.perf_counter()
    while True:
        await asyncio.sleep(TELL_S)
        commits = members[0].life.committed
        print(
            f"{world.clock.now():.0f} s of virtual time in {time.perf_counter() - began:.0f} s of wall time and "
            f"{time.process_time():.0f} of CPU: {_num_placed([each for each in members if each.lives])} have a place, "
            f"round {commits[-1].round if commits else 'none'} decided, "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most",
            flush=True,
        )


def _num_placed(members: list[Member]) -> int:
    heads = [member.peer.head for member in members if member.peer is not None and member.peer._in_rounds is not None]
    return len(heads) - sum(
        member.peer._in_rounds.groups.is_outside
        for member in members
        if member.peer is not None and member.peer._in_rounds is not None
    )


def _sent(member: Member) -> Counter[str]:
    node = member.peer.context.node
    assert isinstance(node, CountedNode)
    sent = Counter(node.sent)
    sent["total"] = node.moved[0]
    return sent


def main() -> None:
    words = sys.argv[1:]
    sizes = [int(word) for word in words if word != "report"] or ([] if words else list(SIZES))
    torch.set_num_threads(1)
    gc.set_threshold(200_000, 20, 50)
    if not sizes:
        _report(_measured())
    for num in sizes:
        figures = play(num)
        print(figures, flush=True)
        measured = {known.num: known for known in _measured()} | {num: figures}
        FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode([measured[num] for num in sorted(measured)])))
        _report(_measured())  # again with each: the last takes many times as long as those before


def _measured() -> list[Figures]:
    return msgspec.json.decode(FIGURES.read_bytes(), type=list[Figures]) if FIGURES.exists() else []


def _report(played: list[Figures]) -> None:
    sections = [
        f"An electorate of {ELECTORS}; links of {1000 * DELAY_S:g} ms one way and up to {1000 * JITTER_S:g} ms jitter; "
        f"{TRAIN_S:g} s of training in a round. The same bytes are decoded, and the same signature is checked, once "
        "for all peers of the process; all else each peer does for itself, but that it keeps neither checkpoints nor "
        "journals. Each size is of the commit beside it.",
        _runs(played),
        f"Bytes that each sends per second, over {NUM_ROUNDS} rounds, in frames without the transport's own overhead. "
        "Voting is all that rounds say but payloads and results: letters, decisions, offers, records. The vector is "
        "tiny: payloads and results grow with it, the other two do not.",
        _classes(played),
        *_growth(played),
        "Voting by kind, in the mean over the peers of a kind:",
        _letters(played),
        *(f"Not measured: {size:,} peers." for size in SIZES if size not in {each.num for each in played}),
    ]
    write("thousand", "Groups: what hundreds of peers cost each", "python -m benchmarks.thousand", sections)


def _runs(played: list[Figures]) -> str:
    header = (
        "peers",
        "most leaves of one",
        "counted in a round",
        "s per round",
        "virtual s",
        "CPU s of the simulation",
        "of these until all have a place",
        "wall s",
        "MiB, most",
        "commit",
        "load before",
    )
    rows = [
        (
            each.num,
            each.most_leaves,
            f"{100 * each.counted:.1f} %",
            f"{each.round_s:.2f}",
            f"{each.virtual_s:.0f}",
            f"{each.cpu_s:.0f}",
            f"{each.fill_cpu_s:.0f}",
            f"{each.wall_s:.0f}",
            f"{each.most_mib:.0f}",
            each.commit,
            "not kept" if each.load is None else f"{each.load:.1f}",
        )
        for each in played
    ]
    return table(header, rows)


def _classes(played: list[Figures]) -> str:
    rows = [
        (each.num, role, f"{each.links[role]:.1f}", *(f"{each.sent[role][kind]:.0f}" for kind in CLASSES))
        for each in played
        for role in each.sent
    ]
    return table(("peers", "who", "links, mean", *CLASSES), rows)


def _growth(played: list[Figures]) -> list[str]:
    first, last = played[0], played[-1]
    rows, apart = [], []
    for kind in ("membership", "voting"):
        for role in first.sent:
            nbytes = [each.sent[role][kind] for each in played]
            spread = max(nbytes) / min(nbytes) - 1
            change = nbytes[-1] / nbytes[0] - 1
            of_round = (1 + change) * last.round_s / first.round_s - 1
            rows.append(
                (
                    kind,
                    role,
                    f"{100 * spread:.1f} %",
                    f"{100 * change:+.1f} %",
                    f"{100 * of_round:+.1f} %" if kind == "voting" else "",
                )
            )
            if spread > MOST_APART:
                apart.append(f"{kind} of {'all in the mean' if role == 'mean of all' else f'each {role}'}")
    compared = f"from {first.num:,} to {last.num:,} peers"
    header = ("bytes of", "who", "most against least of all sizes", f"per second, {compared}", f"per round, {compared}")
    return [
        f"How much that changes with the number of peers; the aim is {100 * MOST_APART:.0f} % at most, per second:",
        table(header, rows),
        f"More than {100 * MOST_APART:.0f} % apart: {', and '.join(apart) or 'nothing'}. {WHY}",
        _handed_on(played),
    ]


def _handed_on(played: list[Figures]) -> str:
    rows = []
    for each in played:
        num_leaves, sent = each.num - ELECTORS, each.letters
        by_all = {kind: ELECTORS * sent["elector"][kind] + num_leaves * sent["leaf"][kind] for kind in HANDED_ON}
        rows.append(
            (
                each.num,
                f"{num_leaves / ELECTORS:.1f}",
                *(f"{each.round_s * by_all[kind] / num_leaves:.0f}" for kind in HANDED_ON),
                *(f"{100 * num_leaves * sent['leaf'][kind] / by_all[kind]:.0f} %" for kind in HANDED_ON),
                f"{each.round_s * sum(sent['leaf'].values()):.0f}",
            )
        )
    header = (
        "peers",
        "leaves of an elector, mean",
        "bytes of a certificate",
        "of a record",
        "certificates that leaves sent, not electors",
        "records that leaves sent",
        "bytes of voting that a leaf sends in a round",
    )
    return table(header, rows)


def _letters(played: list[Figures]) -> str:
    roles = ("elector", "leaf")
    kinds = sorted({kind for each in played for role in roles for kind in each.letters[role]})
    weight = {kind: max(each.letters[role].get(kind, 0.0) for each in played for role in roles) for kind in kinds}
    rows = [
        (kind, *(f"{each.letters[role].get(kind, 0.0):.0f}" for role in roles for each in played))
        for kind in sorted(kinds, key=lambda kind: -weight[kind])
    ]
    return table(("kind", *(f"{role}, of {each.num:,}" for role in roles for each in played)), rows)


if __name__ == "__main__":
    main()
