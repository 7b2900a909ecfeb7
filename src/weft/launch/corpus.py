"""A transformer of weft's that is trained on texts, in place of which a loop may train what it has (`loop`)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec import UNSET
from torch import Tensor

from weft.clock import Clock
from weft.config import said, told_idle
from weft.data.batch import Batches
from weft.data.corpus import CorpusConfig
from weft.data.store import DataIndex
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, WeftError
from weft.events import Emit, Event, Notice
from weft.ids import PeerId, RunId, short
from weft.launch.fetch import fetch_files, fetch_initial, read_came_with, take_model
from weft.launch.kept import Wish, keep_said, kept_run, meant, require_named, told_kept
from weft.launch.peer import Invitation, Participant, Prepared, beside_texts, context_of, whole
from weft.launch.runs import drop_unbegun, names_in
from weft.launch.session import Options, Session
from weft.launch.terms import Terms, tell
from weft.peer.context import Data, Trainers
from weft.peer.loop.answers import num_at_once
from weft.run.amend import amended, text_of
from weft.run.config import Genesis, RunConfig, RunFile
from weft.run.frozen import LoadFrozen, frozen_of
from weft.run.genesis import initial, on_corpus, pack_private, seal
from weft.run.host import limit_cores
from weft.run.machine import PeerConfig, Use, without_effect
from weft.run.staged import StagedConfig, held_of
from weft.run.trust import AuditedTrust
from weft.store.home import PeerFolder
from weft.store.pool import Pool
from weft.store.tickets import keep_own_data, keep_run_file
from weft.sync.records.acts import Amend
from weft.sync.records.charter import Settings
from weft.texts.beside.serving import cut_of, require_room
from weft.texts.section import kind_with
from weft.training.device import check_fits, choose
from weft.training.judging import judge_of
from weft.training.learner import Learner
from weft.training.rewarded import trainer_of
from weft.training.section_memory import fitting
from weft.wire import printable


class OneProcess:
    """This process alone."""

    has_model = True

    def check_fits(self, run: RunConfig, settings: PeerConfig) -> None:
        device = choose(settings)
        if settings.is_drawing_only and run.reward is UNSET:
            raise ConfigError(
                "is_drawing_only (--draw-only): this run draws no answers to learn from. Leave it out, and this "
                "machine trains."
            )
        if settings.is_drawing_only and (run.is_private or not num_at_once(run)):
            why = "tasks stay with whoever has them" if run.is_private else "a task's answers fit into no message"
            raise ConfigError(f"is_drawing_only (--draw-only): {why}, so nobody draws for others. Leave it out.")
        if run.reward is not UNSET and settings.base_numbers in ("int8", "nf4"):
            raise ConfigError(
                f"base_numbers: in {settings.base_numbers} the model would learn from answers that it would not draw "
                "so. Leave it out, or take bf16."
            )
        if run.reward is not UNSET and not settings.is_drawing_only:  # they judge what it draws
            judge_of(run.reward)
        if settings.serve_nbytes and run.base is not msgspec.UNSET:
            raise ConfigError(
                "serve_nbytes: a part of this run's model is frozen, and such draws no texts. Leave it out, "
                "and serve what has been trained: weft serve last"
            )
        if settings.serve_nbytes:
            cut = cut_of(run)
            require_room(cut, settings, kind_with(cut.codec, device.torch))
        if isinstance(run, StagedConfig):
            fitting(run, settings, device)
        else:
            check_fits(run, settings, device)

    def memory(self, folder: PeerFolder) -> Pool:  # noqa: ARG002  # the protocol's signature
        return Pool(0)

    def held(self, vector: Tensor, folder: PeerFolder) -> Tensor:  # noqa: ARG002  # the same
        return vector

    def learner(
        self, run: RunConfig, settings: PeerConfig, batches: Batches, emit: Emit, clock: Clock, frozen: LoadFrozen
    ) -> Learner:
        return trainer_of(run, settings, batches, emit, clock, frozen)


ONE = OneProcess()

Stages = Callable[[Session, StagedConfig, Data], Prepared[Participant]]
"""Makes the peer of a run with stages."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What is trained: a transformer, on a corpus.

    Args:
        described: the run to be founded, and the folder that paths in it start from.
        named: dotted fields of it that a person has named beside its file, which says the others.
        kept: in its place: a run of this home that is gone on with, as it is.
        agree_to: shown what it costs to join, in a thread of its own; None: nobody is asked.
        on_terms: then told that in one line.
        own_data: what to train on in a private run, and the folder its paths start from.
        own_model: a folder that has the weights which the run that is joined began with.
        trainers: who makes the inner steps.
        stages: None: a run with stages is refused.
        wish: what to do where the home holds a run of that name which differs.
        notes: what whoever asks for this should know.
    """

    described: tuple[RunFile, Path] | None = None
    named: Sequence[str] = ()
    kept: RunId | None = None
    agree_to: Callable[[Terms], bool] | None = None
    on_terms: Callable[[str], object] = lambda _text: None
    own_data: tuple[CorpusConfig, Path] | None = None
    own_model: Path | None = None
    trainers: Trainers = ONE
    stages: Stages | None = None
    wish: Wish = "ask"
    notes: Sequence[str] = ()
    amends: dict[RunId, Amend] = field(default_factory=dict, init=False)  # of a run that is gone on with
    files: dict[RunId, RunFile] = field(default_factory=dict, init=False)  # of a run that one makes
    said: dict[RunId, Settings] = field(default_factory=dict, init=False)  # by the file of a run that is gone on with

    def seal(self, options: Options, emit: Emit) -> tuple[Genesis, Data | None]:
        if self.kept is not None:
            limit_cores(options.settings.caps.cores)
            run, data = kept_run(self.kept, options)
            self.trainers.check_fits(held_of(run), options.settings)
            self._note(run, options.settings, emit)
            emit(Notice(text=told_kept(run, options)))
            return run, data
        assert self.described is not None
        if self.own_data is not None:
            raise ConfigError(
                "data=[...] is for joining a private run. Whoever makes a run names its files in the run file."
            )
        run_file, base = self.described
        settings = options.settings
        limit_cores(settings.caps.cores)
        before = names_in(options.home)
        sealed = seal(run_file, base, options.home, emit, max_parameters=settings.max_parameters)
        made = sealed.config.run
        try:
            require_named(run_file, sealed.config, options.home)
            self.files[made] = run_file
            self.trainers.check_fits(held_of(sealed.config), settings)
            run, amends, text, said = meant(sealed.config, options, self.wish, self.named)
        except WeftError:
            drop_unbegun(made, options.home, before)
            raise
        if run.run != made:  # the one that is gone on with has all that both name
            drop_unbegun(made, options.home, before)
        self._note(run, settings, emit)
        if text:
            emit(Notice(text=text))
        if amends is not None:
            self.amends[run.run] = amends
        if said is not None:
            self.said[run.run] = said
        return run, Data(sealed.tokenizer, sealed.store, sealed.index, sealed.came_with)

    async def agree(self, s: Session, invitation: Invitation) -> bool:
        settings, charter = s.options.settings, invitation.charter
        limit_cores(settings.caps.cores)
        run = on_corpus(invitation.run)
        self._note(run, settings, s.emit)
        self._require_fitting_data(run, s.options.names.data)
        now = run if charter is None else on_corpus(amended(run, charter))  # what it costs is by what holds now
        await asyncio.to_thread(self.trainers.check_fits, held_of(now), settings)
        if self.own_model is not None:
            await asyncio.to_thread(take_model, run, self.own_model, s.options.home)
        asked = await invitation.terms(s, now)
        if self.agree_to is None:
            tell(asked, s.emit, self.on_terms)
        elif invitation.is_return:  # what it costs was agreed to before
            called = f"run {short(run.run)} ({printable(run.name)})"
            s.emit(Notice(text=f"this machine is a member of {called}: {_going_on(invitation.member_at)}"))
        elif not await asyncio.to_thread(self.agree_to, asked):
            return False
        s.day.require(asked.fetch_nbytes)
        return True

    async def prepare(
        self, s: Session, genesis: Genesis, members: Sequence[PeerId], data: Data | None
    ) -> Prepared[Participant]:
        run, trainers = on_corpus(genesis), self.trainers
        if run.run in self.files:
            keep_run_file(s.folder, text_of(msgspec.structs.replace(self.files[run.run], run=run.run)))
        if run.run in self.said:
            keep_said(s.folder, self.said[run.run])
        if isinstance(run, StagedConfig):
            if self.stages is None:
                raise ConfigError("this run has stages, which this program cannot hold. Join it with: weft join -")
            return self.stages(s, run, data or await self._fetched(s, run, members))
        if members:
            await fetch_initial(s.node, members, run, s.options.home)
        outer = await asyncio.to_thread(self._outer, s, run)
        if outer is None:
            raise ConfigError(
                "the run's initial weights could not be fetched. Ask a member for a fresh ticket."
                if data is None
                else "the run's initial weights are not on this machine; start the run again from its file."
            )
        held = data or await self._fetched(s, run, members)
        if run.is_private:
            keep_own_data(s.folder, held.index)

        s, texts = beside_texts(s, run, held.tokenizer) if trainers.has_model else (s, None)

        frozen = partial(frozen_of, run, s.options.home, held.tokenizer, held.came_with)

        def make_learner(emit: Emit) -> Learner:
            return trainers.learner(run, s.options.settings, held.batches(run, "train"), emit, s.clock, frozen)

        context = context_of(s, held, outer, make_learner, memory=trainers.memory(s.folder), texts=texts)
        return await whole(s, run, context, self.amends.get(run.run))

    def _outer(self, s: Session, run: RunConfig) -> Tensor | None:
        vector = initial(run, s.options.home)
        return None if vector is None else self.trainers.held(vector, s.folder)

    async def _fetched(self, s: Session, run: RunConfig, members: Sequence[PeerId]) -> Data:
        home = s.options.home
        tokenizer = await fetch_files(s.node, members, run, home, s.clock, s.emit)
        came_with = read_came_with(run, home)
        if run.is_private:
            return Data(tokenizer, home.private, await self._own(s, run, tokenizer, came_with), came_with)
        return Data(tokenizer, home.shards, run.data, came_with)

    async def _own(self, s: Session, run: RunConfig, tokenizer: Tokenizer, came_with: bytes) -> DataIndex:
        self._require_fitting_data(run, s.options.names.data)
        assert self.own_data is not None
        corpus, base = self.own_data
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:  # from the thread that packs
            loop.call_soon_threadsafe(s.emit, event)

        return await asyncio.to_thread(pack_private, run, tokenizer, came_with, corpus, base, s.options.home, emit)

    def _note(self, run: RunConfig, settings: PeerConfig, emit: Emit) -> None:
        """Tell what whoever asks for this should know, and which of the machine's settings such a run does not use."""
        use: Use = "stage" if isinstance(run, StagedConfig) else "whole" if self.trainers.has_model else "site"
        idle = without_effect(settings, use)
        idle = {name: why for name, why in idle.items() if name not in without_effect(settings)}
        if settings.base_numbers != "auto" and run.model.adapter is UNSET:
            idle["base_numbers"] = "this run trains no adapter"
        if not isinstance(run.trust, AuditedTrust) and use == "whole":
            idle["check"] = "members of this run do not audit each other"
        for text in (*self.notes, *told_idle("this machine's settings", said(settings), idle)):
            emit(Notice(text=text))

    def _require_fitting_data(self, run: RunConfig, name: str) -> None:
        """
        Args:
            name: of what files of one's own are given with.

        Raises:
            ConfigError: files of one's own are named where none are trained on, or the other way round.
        """
        if run.is_private and self.own_data is None:
            raise ConfigError(f"this run is private: every peer trains on its own files. Name yours with {name}.")
        if self.own_data is not None and not run.is_private:
            raise ConfigError(
                "this run is not private: everybody trains on the run's own text, fetched from members, and weft "
                f"reads none of your files. Leave out {name}."
            )


def _going_on(member_at: int | None) -> str:
    return (
        "it saved nothing of it, and begins as a newcomer" if member_at is None else f"going on from round {member_at}"
    )
