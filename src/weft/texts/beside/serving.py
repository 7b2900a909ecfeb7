"""Text for those that ask, by the stages that this peer trains; a whole model is one stage.

    after a round that is due (`versions`)           a section's parameters are copied, at all members of all stages
    soon after                                       they are on the device, and new texts are drawn with them

So all stages have weights of the same rounds, and whoever asks takes the newest that go together. Parameters that are
trained are never drawn with. A tied matrix has a run of its own: a section at an end waits for its copy of that round.

Steps of texts have a thread of their own, and a share of the device (`share`); new weights are made ready on another,
and taken between two steps. Of two versions one is let go of before a third is made: no more than two are ever here.

Failure:
- a stage is left, or this peer ends: texts that are drawn here go on at others.
- a pause: texts are drawn on, with all of the device.
- what is trained becomes NaN: the weights before stay, and the failure ends the peer as it does anyway.
- there is no memory for new weights: it is said, texts go on with those before, and training goes on.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from weft.chat.grammar import Forms
from weft.chat.vocabulary import Vocabulary
from weft.clock import Clock, SystemClock
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import Bf16Config
from weft.data.tokenizer import Tokenizer, from_bytes
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE
from weft.engine.step import KeysAndValues, Weights, page_nbytes
from weft.errors import ConfigError, WeftError
from weft.events import Emit, Notice
from weft.ids import PeerId
from weft.model.config import ModelConfig
from weft.model.sections import Section as Piece
from weft.model.sections import whole
from weft.pipeline.link import StageLink
from weft.run.config import RunConfig
from weft.run.host import num_cores
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.store.chunks import raw
from weft.tasks import Compute, Tasks
from weft.texts.beside.share import Beside, Watched, threads_beside
from weft.texts.beside.versions import Take, is_due, taken
from weft.texts.forms import FormReader
from weft.texts.member import Member, listen
from weft.texts.messages import SectionServed
from weft.texts.receipts.receipt import weights_digest
from weft.texts.section import Section, codec_of, kind_with
from weft.training.device import choose, is_out_of_memory
from weft.training.text_memory import LOG_SHARE

T = TypeVar("T")

EVERY = 8  # rounds of the first of several stages, at least: a stage that lags a few has the same ones
MAX_COPIES = 2  # of a piece: ends wait for a tied matrix, or it for them


@dataclass(frozen=True)
class Cut:
    """A run's model, as its members draw texts of it.

    Args:
        pieces: the section of each stage, and a tied matrix that lies apart.
        tied: number of that; None: there is none.
        codec: of activations.
        every: rounds from one version to the next, at least.
        has_learnt: whether it begins with weights that are worth a text.
        tokenizer: for answers of a form; None: members hold to none.
    """

    model: ModelConfig
    pieces: tuple[Piece, ...]
    tied: int | None
    codec: Codec
    every: int
    has_learnt: bool
    tokenizer: Tokenizer | None = None

    @property
    def stages(self) -> int:
        return len(self.pieces) - (self.tied is not None)

    def has_tied(self, stage: int) -> bool:
        """Whether a stage computes with a matrix that lies apart."""
        return self.tied is not None and stage in {0, self.stages - 1}

    def called(self, stage: int) -> str:
        return "the whole model" if self.stages == 1 else f"stage {stage + 1}"


def cut_of(run: RunConfig, tokenizer: Tokenizer | None = None) -> Cut:
    has_learnt = not run.is_seeded
    if isinstance(run, StagedConfig):
        codec = codec_of(run.pipeline.activations)
        return Cut(run.model, run.pieces, run.tied, codec, EVERY, has_learnt, tokenizer)
    return Cut(run.model, (whole(run.model),), None, build(Bf16Config()), 1, has_learnt, tokenizer)


def require_room(cut: Cut, settings: PeerConfig, kind: Kind) -> None:
    """
    Raises:
        ConfigError: what texts may take holds not one page of some stage.
    """
    page = max(page_nbytes(cut.model, kind, len(cut.pieces[stage].layers)) for stage in range(cut.stages))
    if _num_pages(settings, page) < 1:
        least, what = math.ceil(page / (1 - LOG_SHARE)), "the model" if cut.stages == 1 else "a stage"
        raise ConfigError(
            f"serve_nbytes: {settings.serve_nbytes:,} bytes have no room for conversations: {PAGE} tokens of {what} "
            f"of this run take {least:,}. Set serve_nbytes to many times that, or to 0 to draw no text."
        )


def _num_pages(settings: PeerConfig, nbytes: int) -> int:
    return int((1 - LOG_SHARE) * settings.serve_nbytes) // nbytes


def share_device(
    settings: PeerConfig, compute: Compute, clock: Clock, emit: Emit
) -> tuple[PeerConfig, Compute, Beside]:
    """Return what a peer works with that draws texts, too: training is watched, and leaves them a core of a CPU."""
    device, watched, threads = choose(settings), Watched(compute, clock), (0, 0)
    if device.is_cpu and isinstance(clock, SystemClock):
        cores = min(num_cores(), settings.caps.cores or num_cores())
        threads = threads_beside(cores, torch.get_num_threads(), min(settings.threads, cores))
        settings = msgspec.structs.replace(settings, threads=threads[0])
    return settings, watched, Beside(settings.serve_share, watched, clock, device.torch, threads, emit)


@dataclass(eq=False)
class _Served:
    """A stage that this peer holds.

    Args:
        copies: of its parameters after rounds, which are to be made ready.
        due: when these rounds were settled.
        ready: the same of each version that texts are drawn with.
        kept: pages, once the first version is made.
        member: from then on.
    """

    copies: dict[int, Tensor] = field(default_factory=dict)
    due: dict[int, float] = field(default_factory=dict)
    ready: dict[int, float] = field(default_factory=dict)
    kept: KeysAndValues | None = None
    member: Member | None = None


class Serving:
    """Of one peer.

    Args:
        settings: `serve_nbytes` says how much texts of a stage may take.
        beside: computes; it is closed with this.

    Raises:
        ConfigError: as `require_room`; no such device.
    """

    def __init__(
        self, cut: Cut, settings: PeerConfig, link: StageLink, clock: Clock, beside: Beside, emit: Emit
    ) -> None:
        self._cut, self._settings, self._clock, self._emit = cut, settings, clock, emit
        self._link = link
        self._beside = beside
        self._device = choose(settings).torch
        self._kind = kind_with(cut.codec, self._device)
        require_room(cut, settings, self._kind)
        self._served: dict[int, _Served] = {}
        self._tables: dict[int, Tensor] = {}  # copies of a tied matrix, by round
        self._others: dict[tuple[int, PeerId], tuple[int, ...]] = {}  # versions of members, as they tell
        self._making = asyncio.Lock()
        self._tasks = Tasks()
        listen(link)
        link.on_note(SectionServed, self._on_served)
        link.on_parted(self._on_parted)

    async def settled(self, piece: int, round: int, outer: object) -> None:
        """A round of the first stage is in a piece's parameters, which nothing changes until this returns."""
        if not isinstance(outer, Tensor) or not (round or self._cut.has_learnt):
            return
        ends: tuple[int, ...]
        if piece == self._cut.tied:
            copies, ends, is_wanted = self._tables, (0, self._cut.stages - 1), round % self._cut.every == 0
        else:
            served = self._served.setdefault(piece, _Served())
            copies, ends, is_wanted = served.copies, (piece,), self._take(piece, served, round) is not None
        if not is_wanted:
            return
        settled_at = self._clock.now()
        try:
            copies[round] = await self._beside.copied(lambda: outer.detach().clone())
        except (RuntimeError, MemoryError) as error:
            self._tell_failed(round, error)
            return
        for old in sorted(copies)[:-MAX_COPIES]:
            del copies[old]
        if piece != self._cut.tied:
            served.due = {round: settled_at} | {each: at for each, at in served.due.items() if each in copies}
        for stage in ends:
            self._tasks.spawn(self._try_to_make(stage, round))

    async def let_go(self, piece: int) -> None:
        """This peer holds a piece no longer."""
        if piece == self._cut.tied:
            self._tables.clear()
        elif (served := self._served.pop(piece, None)) is not None and served.member is not None:
            await served.member.aclose()

    async def aclose(self) -> None:
        await self._tasks.aclose()
        for stage in list(self._served):
            await self.let_go(stage)
        await self._beside.aclose()

    # --- which versions ---

    async def _on_served(self, peer: PeerId, note: SectionServed) -> None:
        if note.rounds:
            self._others[note.stage, peer] = note.rounds
        else:
            self._others.pop((note.stage, peer), None)

    def _on_parted(self, peer: PeerId) -> None:
        for stage, other in [each for each in self._others if each[1] == peer]:
            del self._others[stage, other]

    def _take(self, stage: int, served: _Served, round: int) -> Take | None:
        """Return how a round's weights are taken; None: they are passed over."""
        now, member = self._clock.now(), served.member
        ages_s = {version: now - at for version, at in served.ready.items()}
        others = [rounds for other, rounds in self._others.items() if other != (stage, self._link.me)]
        newest = max(ages_s, default=None)
        since_s = 0.0 if newest is None else ages_s[newest]
        meets_all = all(any(each in ages_s for each in rounds) for rounds in others)
        if not is_due(round, self._cut.every, newest, since_s, meets_all=meets_all):
            return None
        num_texts = {} if member is None else {each: member.num_texts_of(each) for each in ages_s}
        return taken(ages_s, others, num_texts)

    # --- what is made of them ---

    async def _try_to_make(self, stage: int, round: int) -> None:
        try:
            await self._make(stage, round)
        except (RuntimeError, MemoryError, WeftError) as error:
            self._tell_failed(round, error)

    def _tell_failed(self, round: int, error: Exception) -> None:
        less = " Lower serve_nbytes." if is_out_of_memory(error) else ""
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self._emit(Notice(text=f"no text is drawn with the weights after round {round}: {why}.{less}"))

    async def _make(self, stage: int, round: int) -> None:
        """Let new texts be drawn with a round's weights, where all of them are here."""
        has_tied = self._cut.has_tied(stage)
        async with self._making:
            if (served := self._served.get(stage)) is None:
                return
            vector = served.copies.get(round)
            table = self._tables.get(round) if has_tied else None
            if vector is None or (has_tied and table is None):
                return
            settled_at = served.due.pop(round)
            del served.copies[round]
            if (take := self._take(stage, served, round)) is None:
                return
            await self._beside.start()
            if take.drop is not None and served.member is not None:
                del served.ready[take.drop]
                served.member.drop(take.drop)
                await self._beside.between()  # which may compute with it
            section = await self._beside.made(lambda: self._section(stage, served, vector, table))
            if self._served.get(stage) is not served:  # left meanwhile
                return
            served.ready[round] = settled_at
            if served.member is not None:
                served.member.renew(round, section)
            else:
                forms = await self._forms_at(stage)
                if self._served.get(stage) is served:
                    served.member = self._member(stage, round, served, section, forms)

    async def _forms_at(self, stage: int) -> FormReader | None:
        """Return what reads forms of answers, where a stage draws; a tokenizer of many tokens takes a while."""
        tokenizer = self._cut.tokenizer
        if tokenizer is None or stage != self._cut.stages - 1:
            return None

        def made() -> Forms:  # of a tokenizer of its own: what is trained on is read with the other one
            forms = Forms(Vocabulary(from_bytes(tokenizer.to_bytes())), self._cut.model.vocab_size)
            forms.warm()
            return forms

        try:
            forms = await self._beside.made(made)
        except (ValueError, RuntimeError) as error:
            self._emit(Notice(text=f"this peer draws no answers of a form (response_format): {error}"))
            return None
        return FormReader(forms, self._read)

    async def _read(self, work: Callable[[], T]) -> T:
        """Read what a stranger has sent: neither steps nor new weights wait for it, nor it for them."""
        return await asyncio.to_thread(work) if isinstance(self._clock, SystemClock) else work()

    def _section(self, stage: int, served: _Served, vector: Tensor, table: Tensor | None) -> Section:
        cut, piece = self._cut, self._cut.pieces[stage]
        digest = weights_digest(*(raw(each.cpu()) for each in (vector, table) if each is not None))
        if table is not None:
            table = table.view(cut.model.vocab_size, cut.model.width).to(self._device)
        weights = Weights(cut.model, vector.to(self._device), self._kind, piece, table)
        if served.kept is None:
            num_layers = len(piece.layers)
            num_pages = _num_pages(self._settings, page_nbytes(cut.model, self._kind, num_layers))
            served.kept = KeysAndValues(cut.model, num_pages, self._device, self._kind, num_layers)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # steps run on another
        return Section(weights, served.kept, cut.codec, digest)

    def _member(self, stage: int, round: int, served: _Served, section: Section, forms: FormReader | None) -> Member:
        settings = self._settings
        assert served.kept is not None
        num_pages = served.kept.num_pages
        member = Member(
            self._link,
            stage,
            section,
            round=round,
            num_pages=num_pages,
            log_nbytes=int(LOG_SHARE * settings.serve_nbytes),
            clock=self._clock,
            run=self._beside.run,
            turn=self._beside.turn,
            num_stages=self._cut.stages,
            forms=forms,
        )
        member.start()
        text = (
            f"this peer draws text with {self._cut.called(stage)}: room for {num_pages * PAGE:,} tokens of all "
            f"conversations together, and {self._beside}"
        )
        self._emit(Notice(text=text))
        return member
