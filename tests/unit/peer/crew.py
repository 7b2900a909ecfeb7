"""Whole peers of one run in this process, as `weft.launch.peer` makes them: TLS on loopback, a home for each.

crew = Crew(tmp_path)
async with crew.deadline():
    a = crew.found("a", wait_for=2)
    b = crew.join("b")
    await crew.done(a, b)
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.codec.config import Fp32Config
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import Entry, Event, MemberProgress, StepDone
from weft.ids import PeerId
from weft.launch.corpus import Corpus
from weft.launch.peer import Opened, found, join
from weft.launch.session import Options
from weft.net.transport.tls import TlsConfig
from weft.peer.peer import Outcome, Peer
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.sync.method.presets import FedAvgConfig, MethodConfig
from weft.sync.method.schedule import ConstantConfig

E = TypeVar("E", bound=Event)

ENDS_S = 120  # only ends a test that would hang: on a machine that does little else a crew takes two seconds
SEQ_LEN, BATCH, EVERY = 16, 2, 2
LEASE_TOKENS = SEQ_LEN * BATCH * EVERY
TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(800))
FEDAVG = FedAvgConfig(every=EVERY, codec=Fp32Config())

Prepare = Callable[[Peer], Awaitable[None] | None]


class Member:
    """One start of one peer: what it said, and how it ended."""

    def __init__(self, name: str, home: Home) -> None:
        self.name = name
        self.home = home
        self.entries: list[Entry] = []
        self.peer: Peer = None  # type: ignore[assignment]
        self.task: asyncio.Task[Outcome | None] = None  # type: ignore[assignment]
        self.side: asyncio.Task[None] | None = None
        self.started = asyncio.Event()
        self.ticket = ""
        self._news = asyncio.Event()

    @property
    def id(self) -> PeerId:
        return self.peer.peer

    def write(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._news.set()

    def close(self) -> None:
        pass

    def seen(self, kind: type[E]) -> list[E]:
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    async def until(self, kind: type[E], is_wanted: Callable[[E], bool] = lambda event: True) -> E:
        """Wait until it has said such an event."""
        while not (found := [event for event in self.seen(kind) if is_wanted(event)]):
            self._news.clear()
            await self._news.wait()
        return found[0]

    def told(self) -> str:
        """Return all it said but its steps, for the message of a test that fails."""
        kept = (entry for entry in self.entries if not isinstance(entry.event, StepDone | MemberProgress))
        return "\n".join(f"{entry.at % 1000:.2f} {self.name} {entry.event}"[:300] for entry in kept)


class Crew:
    def __init__(
        self, root: Path, *, num_rounds: int = 4, num_peers: int = 3, method: MethodConfig = FEDAVG, **run: Any
    ) -> None:
        torch.set_num_threads(1)
        self.root = root
        self.members: list[Member] = []
        path = root / "text.txt"
        path.write_text(TEXT)
        every = getattr(method, "every", 1)
        train: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "batch_size": BATCH,
            "tokens": num_rounds * num_peers * every * BATCH * SEQ_LEN,
            "schedule": ConstantConfig(lr=1e-2),
            "evaluate_every": 0,
            "evaluate_windows": 4,
        }
        fields: dict[str, Any] = {
            "name": "crew",
            "peers": num_peers,
            "model": ShapedModel(num_layers=1, num_heads=2, width=32, ffn_width=48),
            "data": CorpusConfig(source=TextSource(paths=("text.txt",))),
            "train": TrainConfig(**(train | run.pop("train", {}))),
            "method": method,
            "has_even_leases": True,  # however the machine's load falls on them
        }
        self.run_file = RunFile(**(fields | run))

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """End everything that was started, however the test ends; say what all said if it took too long."""
        try:
            async with asyncio.timeout(ENDS_S):
                yield
        except TimeoutError:
            raise AssertionError("\n".join(member.told() for member in self.members)) from None
        finally:
            await self._end()

    async def _end(self) -> None:
        tasks = [task for member in self.members for task in (member.side, member.task) if task is not None]
        for member in self.members:
            if member.side is not None:
                member.side.cancel()
            if member.started.is_set():
                member.peer.stop("the test is over")  # cancelled in the middle of its clean-up, it would leave sockets
            elif not member.task.done():
                member.task.cancel()
        _, late = await asyncio.wait(tasks, timeout=ENDS_S / 4)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def found(
        self,
        name: str,
        wait_for: int = 1,
        *,
        run_file: RunFile | None = None,
        prepare: Prepare | None = None,
        **given: Any,
    ) -> Member:
        member, options, on_started = self._member(name, prepare, given)
        work = Corpus(described=(run_file or self.run_file, self.root))
        start = found(work, options, wait_for=wait_for, on_started=on_started)
        member.task = asyncio.ensure_future(start)
        return member

    def join(self, name: str, ticket: str = "", *, prepare: Prepare | None = None, **given: Any) -> Member:
        """Join with `ticket`, or with that of the first member once it listens."""
        work = Corpus(agree_to=given.pop("agree_to", None))
        member, options, on_started = self._member(name, prepare, given)

        async def start() -> Outcome | None:
            first = self.members[0]
            if not ticket:
                await asyncio.wait(
                    (first.task, asyncio.ensure_future(first.started.wait())), return_when=asyncio.FIRST_COMPLETED
                )
            return await join(work, ticket or first.ticket, options, on_started=on_started)

        member.task = asyncio.ensure_future(start())
        return member

    async def done(self, *members: Member) -> Sequence[Outcome]:
        """Wait until they end, and hold them to what every run must come to."""
        outcomes = await asyncio.gather(*(member.task for member in members))
        told = "\n".join(member.told() for member in members)
        assert [outcome.reason for outcome in outcomes if outcome] == ["complete"] * len(members), told
        assert len({outcome.replica for outcome in outcomes if outcome}) == 1, told
        return [outcome for outcome in outcomes if outcome]

    def _member(self, name: str, prepare: Prepare | None, given: dict[str, Any]) -> tuple[Member, Options, Any]:
        home = given.pop("home", None) or Home(self.root / name)
        member = Member(name, home)
        self.members.append(member)
        fields: dict[str, Any] = {
            "name": name,
            "device": "cpu",
            "threads": 1,
            "micro_batch": BATCH,
            "transports": ("tls",),
            "tls": TlsConfig(host="127.0.0.1"),
        }
        options = Options(
            home=home, key=given.pop("key", None), settings=PeerConfig(**(fields | given)), sinks=(member,)
        )

        def on_started(peer: Peer, opened: Opened) -> None:
            member.peer, member.ticket = peer, opened.ticket
            member.started.set()
            side = None if prepare is None else prepare(peer)
            if side is not None:
                member.side = asyncio.ensure_future(side)  # type: ignore[arg-type]

        return member, options, on_started
