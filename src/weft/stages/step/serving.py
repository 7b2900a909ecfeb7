"""Text for those that ask, by the stages that this peer trains.

    after every `EVERY` rounds of the first stage     a section's parameters are copied, at all members of all stages
    soon after                                        they are on the device, and new texts are drawn with them

So all stages have weights of the same rounds, and whoever asks takes the newest that go together. Parameters that are
trained are never drawn with. A tied matrix has a run of its own: a section at an end waits for its copy of that round.

Steps of texts have a thread of their own: rounds and training go on beside them.

Failure:
- a stage is left, or this peer ends: texts that are drawn here go on at others.
- what is trained becomes NaN: the weights before stay, and the failure ends the peer as it does anyway.
"""

import asyncio

import torch
from torch import Tensor

from weft.clock import Clock, SystemClock
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import Bf16Config
from weft.codec.dense import Fp32
from weft.engine.load import kind_for
from weft.engine.numbers import Kind
from weft.engine.pages import PAGE
from weft.engine.step import KeysAndValues, Weights, page_nbytes
from weft.events import Emit, Notice
from weft.pipeline.codec.activations import NumberConfig
from weft.pipeline.link import StageLink
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.store.chunks import raw
from weft.tasks import Compute, Inline, Tasks, Threads
from weft.texts.member import Member, listen
from weft.texts.receipt import weights_digest
from weft.texts.section import Section
from weft.training.device import choose

EVERY = 8  # rounds of the first stage: copies cost a moment, and a stage that lags a few rounds has the same ones
LOG_SHARE = 0.2  # of what texts may take; the rest is for pages


def codec_of(run: StagedConfig) -> Codec:
    """Return what encodes a row of activations of texts, the same at all peers: the run's own where it is one of
    numbers alone, else bf16."""
    activations = run.pipeline.activations
    return build(activations if isinstance(activations, NumberConfig) else Bf16Config())


def kind_with(codec: Codec, device: torch.device) -> Kind:
    """Return the numbers of a member: exact ones where activations are handed on whole, and cost no more than int8."""
    kind = kind_for(device)
    return "exact" if kind == "int8" and isinstance(codec, Fp32) else kind


class Serving:
    """Of one peer.

    Args:
        settings: `serve_nbytes` says how much texts of a stage may take.
        compute: copies.
    """

    def __init__(
        self, run: StagedConfig, settings: PeerConfig, link: StageLink, clock: Clock, compute: Compute, emit: Emit
    ) -> None:
        self._run, self._settings, self._clock, self._emit = run, settings, clock, emit
        self._link = link
        self._codec = codec_of(run)
        self._copying = compute
        self._compute: Compute = Threads() if isinstance(clock, SystemClock) else Inline()
        self._device = choose(settings).torch
        self._kind = kind_with(self._codec, self._device)
        self._kept: dict[int, KeysAndValues] = {}
        self._members: dict[int, Member] = {}
        self._copies: dict[int, dict[int, Tensor]] = {}  # of each piece, by round
        self._making = asyncio.Lock()
        self._tasks = Tasks()
        listen(link)

    async def settled(self, piece: int, round: int, outer: object) -> None:
        """A round of the first stage is in a piece's parameters, which nothing changes until this returns."""
        if round % EVERY or not isinstance(outer, Tensor):
            return
        copies = self._copies.setdefault(piece, {})
        copies[round] = await self._copying.serve(lambda: outer.detach().clone())
        for old in sorted(copies)[:-2]:
            del copies[old]
        ends = (0, self._run.stages - 1) if piece == self._run.tied else (piece,)
        for stage in ends:
            self._tasks.spawn(self._make(stage, round))

    async def let_go(self, piece: int) -> None:
        """This peer holds a piece no longer."""
        self._copies.pop(piece, None)
        if (member := self._members.pop(piece, None)) is not None:
            await member.aclose()
        self._kept.pop(piece, None)

    async def aclose(self) -> None:
        await self._tasks.aclose()
        for stage in list(self._members):
            await self.let_go(stage)
        await self._compute.aclose()

    async def _make(self, stage: int, round: int) -> None:
        """Let new texts be drawn with a round's weights, where all of them are here."""
        run = self._run
        async with self._making:
            vector = self._copies.get(stage, {}).get(round)
            table = self._copies.get(run.tied, {}).get(round) if run.tied is not None and run.has_tied(stage) else None
            if vector is None or (run.has_tied(stage) and table is None):
                return
            del self._copies[stage][round]
            section = await self._compute.train(lambda: self._section(stage, vector, table))
            if (member := self._members.get(stage)) is not None:
                member.renew(round, section)
            else:
                self._members[stage] = self._member(stage, round, section)

    def _section(self, stage: int, vector: Tensor, table: Tensor | None) -> Section:
        run = self._run
        piece = run.pieces[stage]
        digest = weights_digest(*(raw(each.cpu()) for each in (vector, table) if each is not None))
        if table is not None:
            table = table.view(run.model.vocab_size, run.model.width).to(self._device)
        weights = Weights(run.model, vector.to(self._device), self._kind, piece, table)
        if stage not in self._kept:
            num_layers = len(piece.layers)
            num_pages = self._num_pages(page_nbytes(run.model, self._kind, num_layers))
            self._kept[stage] = KeysAndValues(run.model, num_pages, self._device, self._kind, num_layers)
        return Section(weights, self._kept[stage], self._codec, digest)

    def _num_pages(self, nbytes: int) -> int:
        return max(1, int((1 - LOG_SHARE) * self._settings.serve_nbytes) // nbytes)

    def _member(self, stage: int, round: int, section: Section) -> Member:
        settings = self._settings
        num_pages = self._kept[stage].num_pages
        member = Member(
            self._link,
            stage,
            section,
            round=round,
            num_pages=num_pages,
            log_nbytes=int(LOG_SHARE * settings.serve_nbytes),
            clock=self._clock,
            run=self._compute.train,
            num_stages=len(self._run.pieces),
        )
        member.start()
        text = (
            f"this peer draws text with {self._run.called(stage)}: room for {num_pages * PAGE:,} tokens of all "
            "conversations together"
        )
        self._emit(Notice(text=text))
        return member
