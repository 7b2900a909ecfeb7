"""What a loop of somebody's own trains: tensors in the place of a model, and the loop in the place of a trainer.

A run that this machine has founded before goes on: with the parameters it began with, whatever the model was built with
this time. Where the config was changed since, whoever starts the loop says what is meant (`kept`).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float32
from torch import Tensor

from weft import wire
from weft.clock import Clock
from weft.config import alike
from weft.errors import ConfigError
from weft.events import Emit, Notice
from weft.ids import Digest, PeerId, RunId, short
from weft.launch.fetch import fetch_initial
from weft.launch.kept import Wish, meant
from weft.launch.peer import Invitation, Prepared, context_of, whole
from weft.launch.session import Options, Session
from weft.launch.terms import tell
from weft.peer.context import Data
from weft.peer.peer import Peer
from weft.run.amend import amended
from weft.run.config import FrozenConfig, Genesis, LoopConfig, SyncConfig, TensorConfig
from weft.run.genesis import initial, read_run
from weft.run.trust import of_run
from weft.store.chunks import raw
from weft.sync.merge.reduce import require
from weft.sync.method.presets import spell_out
from weft.sync.records.acts import Amend
from weft.training.device import check_fits_loop
from weft.training.learner import Learner


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is trained: tensors of somebody's model, in a loop of theirs.

    Args:
        config: the run to be founded; where one is joined, what it is expected to be, or None: whatever it is.
        vector: the tensors' values, as the model was built.
        check: raises where the run's tensors are others.
        wish: what to do where the home holds a run of that name which differs.
        notes: what whoever asks for this should know.
        on_terms: told in one line what it costs to join.
    """

    config: SyncConfig | None
    tensors: tuple[TensorConfig, ...]
    frozen: tuple[FrozenConfig, ...]
    vector: Float32[Tensor, " num"]
    check: Callable[[LoopConfig], None]
    make_learner: Callable[[Genesis, Emit, Clock], Learner]
    wish: Wish = "ask"
    notes: Sequence[str] = ()
    on_terms: Callable[[str], object] = lambda _text: None
    amends: dict[RunId, Amend] = field(default_factory=dict, init=False)  # of a run that is gone on with

    def seal(self, options: Options, emit: Emit) -> tuple[Genesis, Data | None]:
        assert self.config is not None
        home, limit = options.home, options.settings.max_parameters
        sealed = _sealed(self.config, self.tensors, self.frozen, wire.digest(raw(self.vector)))
        require(sealed.method)
        read_run(wire.encode(sealed), limit)  # what others would refuse is refused here, where it can still be changed
        check_fits_loop(sealed, options.settings)
        self._note(emit)
        run, amends, said, _ = meant(sealed, options, self.wish)
        if run is not sealed:
            emit(Notice(text=said or f"going on with run {short(run.run)}, which this machine made before"))
            if amends is not None:
                self.amends[run.run] = amends
            return run, None
        home.blobs.put(raw(self.vector))
        home.blobs.put(wire.encode(sealed))
        return sealed, None

    async def agree(self, s: Session, invitation: Invitation) -> bool:
        run = _of_loops(invitation.run)
        self.check(run)
        if self.config is not None:
            _require_expected(run, self.config)
        self._note(s.emit)
        settings, charter = s.options.settings, invitation.charter
        check_fits_loop(run, settings)
        now = run if charter is None else amended(run, charter)
        asked = await invitation.terms(s, now)
        tell(asked, s.emit, self.on_terms)
        s.day.require(asked.fetch_nbytes)
        return True

    def _note(self, emit: Emit) -> None:
        for text in self.notes:
            emit(Notice(text=text))

    async def prepare(
        self,
        s: Session,
        genesis: Genesis,
        members: Sequence[PeerId],
        data: Data | None,  # noqa: ARG002  # there is none
    ) -> Prepared[Peer]:
        home, run = s.options.home, _of_loops(genesis)
        if members:
            await fetch_initial(s.node, members, run, home)
        vector = await asyncio.to_thread(initial, run, home)
        if vector is None:
            raise ConfigError("the run's initial weights could not be fetched. Ask a member for a fresh ticket.")
        context = context_of(s, None, vector, lambda emit: self.make_learner(run, emit, s.clock))
        return await whole(s, run, context, self.amends.get(run.run))


def _sealed(
    config: SyncConfig, tensors: tuple[TensorConfig, ...], frozen: tuple[FrozenConfig, ...], initial: Digest
) -> LoopConfig:
    resolved = {
        "stewards": tuple(sorted(set(config.stewards))),
        "trust": of_run(config.trust),
        "method": spell_out(config.method, config.peers),
        "tensors": tensors,
        "frozen": frozen,
        "initial": initial,
    }
    return LoopConfig(**alike(LoopConfig, config) | resolved)


def _of_loops(run: Genesis) -> LoopConfig:
    if not isinstance(run, LoopConfig):
        raise ConfigError(f"run {run.name!r} trains a transformer of weft's: join it with `weft join -`.")
    return run


def _require_expected(run: LoopConfig, config: SyncConfig) -> None:
    expected = _sealed(config, run.tensors, run.frozen, run.initial)
    for name in run.__struct_fields__:
        theirs, mine = getattr(run, name), getattr(expected, name)
        if theirs != mine:
            raise ConfigError(
                f"the run has {name} = {_shown(theirs)}, and the config given here {_shown(mine)}. Members train "
                f"alike: make them equal, or give a ticket and no config."
            )


def _shown(value: Any) -> str:
    return wire.printable(str(value))[:300]
