"""Clients that ask weft's members for a text on other ways than weft's ring: those of Petals.

    Star    every member answers the client, which sends what came on to the next: 2 S trips a token
    Chain   members send on to each other, and the last one answers the client, which begins anew: S + 1

Facts on Petals are of github.com/bigscience-workshop/petals at 22afba6 and at v2.2.0, its last release. A token goes
round as in `Star`: a server passes on by itself only what its client tells it to, and no client of these two does
(v2.2.0: servers look into a session's first request, which does not say so; 22afba6: a client says it only where it
has no position, and it has one always). Between #563 and #588 in 2024 it went as in `Chain`.

The client keeps what it sent to each stage. Where a member is gone it opens another and sends all of that again, after
0, 1, 2, 4, .. seconds. At 22afba6 each session holds a position, the new one's is 0, and a step first asserts that it
is the text's; at v2.2.0 a step asserts that what was kept is as long as the session's position and what is new, and the
new one's is 0, too. So nothing but a text's first step outlives a member; #523, which is open since 2023, mends that.
`is_mended` is so. Petals tries without end; here the number is bounded.

Sections, transport and messages are weft's, and links stand before anything is asked, so nothing but the way differs.
The first stage takes tokens and the last one draws, as with weft; Petals' client embeds and draws itself, and so sends
and receives activations there, too.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from itertools import count

from weft.engine.draw import Drawn
from weft.engine.text import Wanted
from weft.errors import CallFailed, NetError, PeerError, Refused
from weft.ids import PeerId
from weft.pipeline.link import StageLink
from weft.rng import fresh_secret
from weft.texts.chain import chain_of, joined, key_of, places, split
from weft.texts.messages import (
    MAX_INLINE_NBYTES,
    SECRET_NBYTES,
    TOKEN_NBYTES,
    CloseSequence,
    OpenSequence,
    ResumeSequence,
    RowsOfText,
    SectionServed,
    SequenceLost,
    SequenceOpened,
    TextRows,
    TokenDrawn,
    drawn_how,
    id_of,
)
from weft.texts.section import packed

NOBODY = PeerId("0" * 64)
OPEN_S = 5.0  # for a member to answer, as `connect_timeout`
BARRED_S = 15.0  # a member that failed, as `ban_timeout`
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0  # between tries, as `min_backoff` and `max_backoff`
MAX_TRIES = 5  # `max_retries`, which is none


class _Session:
    """One member's part in a text.

    Args:
        position: rows that were answered.
        kept: rows that were sent to the stage, by whichever session.
    """

    def __init__(self, peer: PeerId, attempt: int, position: int = 0, kept: bytes = b"") -> None:
        self.peer, self.attempt = peer, attempt
        self.position, self.kept = position, kept
        self.num_fed = 0  # rows that this member was sent
        self._came = bytearray()
        self._wanted_nbytes = 0
        self._answer: asyncio.Future[bytes] | None = None

    def wait(self, nbytes: int) -> "asyncio.Future[bytes]":
        """Return what will hold so many bytes that come from the member."""
        self._came.clear()
        self._wanted_nbytes = nbytes
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def came(self, data: bytes) -> None:
        self._came += data
        if self._answer is not None and not self._answer.done() and len(self._came) >= self._wanted_nbytes:
            self._answer.set_result(bytes(self._came))

    def fail(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CallFailed("the member is gone"))


class _Text:
    def __init__(self, asker: PeerId, wanted: Wanted) -> None:
        self.secret = fresh_secret(SECRET_NBYTES)
        self.id, self.wanted, self.key = id_of(asker, self.secret), wanted, key_of(wanted.salt, 0)
        self.tokens = list(wanted.prompt)
        self.chain = list(chain_of(self.key, self.tokens))
        self.sessions: list[_Session] = []
        self.num_attempts = 0

    @property
    def most(self) -> int:
        return len(self.wanted.prompt) + self.wanted.max_new_tokens

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.chain += chain_of(self.key, (token,), self.chain[-1])[1:]


class Client(ABC):
    """
    Args:
        row_nbytes: of a token's activations, encoded.
    """

    def __init__(self, link: StageLink, *, num_stages: int, row_nbytes: int) -> None:
        self._link, self._num_stages, self._row_nbytes = link, num_stages, row_nbytes
        self._served: dict[int, set[PeerId]] = {stage: set() for stage in range(num_stages)}
        self._barred_until: dict[PeerId, float] = {}
        self._texts: dict[bytes, _Text] = {}
        link.on_note(SectionServed, self._on_served)
        link.on_note(TokenDrawn, self._on_drawn)
        link.on_note(SequenceLost, self._on_lost)
        link.on_parted(self._on_parted)
        for stage in range(1, num_stages):
            link.hold(stage, TextRows, self._on_rows)

    async def begin(self, wanted: Wanted) -> AsyncIterator[Drawn]:
        """Draw a text."""
        while not all(self._served.values()):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.1)
        text = _Text(self._link.me, wanted)
        self._texts[text.id] = text
        try:
            peers = [self._one_of(stage) for stage in range(self._num_stages)]
            text.sessions = [_Session(peer, 0) for peer in peers]
            await asyncio.gather(*(self._open(text, stage, 0) for stage in range(self._num_stages)))
            start = 0
            while len(text.tokens) < text.most:
                token = await self._token(text, start)
                start = len(text.tokens)
                text.add(token)
                yield Drawn(token)
        finally:
            for stage, session in enumerate(text.sessions):
                note = CloseSequence(sequence=text.id, attempt=session.attempt, stage=stage)
                await self._link.post(session.peer, note)
            del self._texts[text.id]

    @abstractmethod
    async def _token(self, text: _Text, start: int) -> int:
        """Send what is new from `start` on round; return the token that follows."""

    @abstractmethod
    def _inward(self, text: _Text, stage: int) -> PeerId:
        """Return who sends rows to a stage."""

    @abstractmethod
    def _onward(self, text: _Text, stage: int) -> PeerId:
        """Return to whom a stage's member sends on."""

    # --- members ---

    def _one_of(self, stage: int) -> PeerId:
        now = asyncio.get_running_loop().time()
        peers = sorted(self._served[stage])
        free = [peer for peer in peers if self._barred_until.get(peer, 0.0) <= now]
        if not peers:
            raise CallFailed(f"nobody serves stage {stage}")
        return (free or peers)[0]

    async def _open(self, text: _Text, stage: int, start: int) -> None:
        """Open a member's session, which answers rows from `start` on."""
        session = text.sessions[stage]
        at, is_last = places(len(text.tokens)), stage == self._num_stages - 1
        call = OpenSequence(
            sequence=text.id,
            secret=text.secret,
            attempt=session.attempt,
            stage=stage,
            round=0,
            inward=self._inward(text, stage),
            onward=self._onward(text, stage),
            most=text.most,
            places=at,
            chain=joined([text.chain[place] for place in at]),
            key=text.key if stage == 0 else None,
            drawing=drawn_how(text.wanted.drawing) if is_last else None,
            tokens=b"",
            num_prompt=len(text.wanted.prompt),
            stop_ids=(),
        )
        answer = await self._link.call(session.peer, call, SequenceOpened, deadline_s=OPEN_S)
        if answer.word != "held":
            raise CallFailed(f"a member answers {answer.word}")
        resume = ResumeSequence(
            sequence=text.id,
            attempt=session.attempt,
            stage=stage,
            keep=0,
            send_from=len(text.tokens) - 1 if is_last else start,
        )
        await self._link.post(session.peer, resume)

    def _given_nbytes(self, stage: int) -> int:
        return TOKEN_NBYTES if stage == 0 else self._row_nbytes

    async def _send(self, text: _Text, stage: int, start: int, data: bytes) -> None:
        """Send rows to a stage's member."""
        session, nbytes = text.sessions[stage], self._given_nbytes(stage)
        per_note = MAX_INLINE_NBYTES // nbytes
        for at in range(0, len(data) // nbytes, per_note):
            some = data[at * nbytes : (at + per_note) * nbytes]
            first = start + at
            last = first if stage == 0 else first + len(some) // nbytes
            rows = RowsOfText(
                sequence=text.id,
                attempt=session.attempt,
                start=first,
                chain=joined(text.chain[first : last + 1]),
                data=some,
            )
            await self._link.post(session.peer, TextRows(stage=stage, rows=(rows,)))

    # --- what is heard ---

    async def _on_served(self, peer: PeerId, note: SectionServed) -> None:
        (self._served[note.stage].add if note.rounds else self._served[note.stage].discard)(peer)

    async def _on_rows(self, peer: PeerId, note: TextRows) -> None:
        for rows in note.rows:
            text = self._texts.get(rows.sequence)
            session = None if text is None else text.sessions[note.stage - 1]
            if session is None or (session.peer, session.attempt) != (peer, rows.attempt):
                continue
            data = rows.data
            if rows.blob is not None:
                nbytes = (len(split(rows.chain)) - 1) * self._row_nbytes
                data = bytes((await self._link.fetch(peer, rows.blob, nbytes)).data)
            session.came(data)

    async def _on_drawn(self, peer: PeerId, note: TokenDrawn) -> None:
        text = self._texts.get(note.sequence)
        session = None if text is None else text.sessions[-1]
        if session is not None and (session.peer, session.attempt) == (peer, note.attempt):
            session.came(packed([note.token]))

    async def _on_lost(self, peer: PeerId, note: SequenceLost) -> None:
        text = self._texts.get(note.sequence)
        if text is not None and text.sessions[note.stage].peer == peer:
            text.sessions[note.stage].fail()

    def _on_parted(self, peer: PeerId) -> None:
        for peers in self._served.values():
            peers.discard(peer)
        for text in self._texts.values():
            for session in text.sessions:
                if session.peer == peer:
                    session.fail()


class Chain(Client):
    """Nobody takes a member's place here."""

    def _inward(self, text: _Text, stage: int) -> PeerId:
        return text.sessions[stage - 1].peer if stage else self._link.me

    def _onward(self, text: _Text, stage: int) -> PeerId:
        return text.sessions[stage + 1].peer if stage < self._num_stages - 1 else NOBODY

    async def _token(self, text: _Text, start: int) -> int:
        answer = text.sessions[-1].wait(TOKEN_NBYTES)
        await self._send(text, 0, start, packed(text.tokens[start:]))
        return int.from_bytes(await answer, "little")


class Star(Client):
    """
    Args:
        is_mended: whether a new member's session begins where the text is.
    """

    def __init__(self, link: StageLink, *, num_stages: int, row_nbytes: int, is_mended: bool = True) -> None:
        super().__init__(link, num_stages=num_stages, row_nbytes=row_nbytes)
        self.is_mended = is_mended

    def _inward(self, text: _Text, stage: int) -> PeerId:  # noqa: ARG002
        return self._link.me

    def _onward(self, text: _Text, stage: int) -> PeerId:  # noqa: ARG002
        return self._link.me if stage < self._num_stages - 1 else NOBODY

    async def _token(self, text: _Text, start: int) -> int:
        data = packed(text.tokens[start:])
        for stage in range(self._num_stages):
            data = await self._through(text, stage, start, data)
        return int.from_bytes(data, "little")

    async def _through(self, text: _Text, stage: int, start: int, data: bytes) -> bytes:
        """Return what a stage makes of rows, whoever computes it."""
        for number in count():
            try:
                if number:
                    await self._replace(text, stage, start)
                session = text.sessions[stage]
                if session.position != start:
                    raise CallFailed(f"a session at {session.position} is asked for {start}: AssertionError")
                return await self._step(text, stage, start, data)
            except (PeerError, NetError, Refused):
                self._barred_until[text.sessions[stage].peer] = asyncio.get_running_loop().time() + BARRED_S
                if number + 1 == MAX_TRIES:
                    raise
            await asyncio.sleep(min(FIRST_PAUSE_S * 2.0 ** (number - 1), MOST_PAUSE_S) if number else 0.0)
        raise AssertionError

    async def _step(self, text: _Text, stage: int, start: int, data: bytes) -> bytes:
        session, nbytes = text.sessions[stage], self._given_nbytes(stage)
        if session.peer not in self._served[stage]:
            raise CallFailed("the member is gone")
        session.kept = session.kept[: start * nbytes] + data  # a second try brings what the first one kept
        num, num_fed = len(session.kept) // nbytes, session.num_fed
        answer = session.wait(TOKEN_NBYTES if stage == self._num_stages - 1 else (num - start) * self._row_nbytes)
        session.num_fed = num
        await self._send(text, stage, num_fed, session.kept[num_fed * nbytes :])
        found = await answer
        session.position = num
        return found

    async def _replace(self, text: _Text, stage: int, start: int) -> None:
        text.num_attempts += 1
        position = start if self.is_mended else 0
        kept = text.sessions[stage].kept
        text.sessions[stage] = _Session(self._one_of(stage), text.num_attempts, position, kept)
        await self._open(text, stage, start)
