"""From a run of loops of members' own, or a ticket to one, to a running peer.

It is as `launch`, with tensors in the place of a model, and a loop in the place of a trainer.

    outcome = await found(config, loop, options, wait_for=1, on_started=show_ticket)
    outcome = await join(ticket_text, config, loop, options, on_started=...)

A run that this machine has founded before goes on: with the parameters it began with, whatever the model was built with
this time.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from jaxtyping import Float32
from torch import Tensor

from weft import wire
from weft.clock import Clock, SystemClock
from weft.errors import ConfigError, DataError
from weft.events import Emit, Notice
from weft.executor import Compute, Threads
from weft.ids import Digest, RunId, short
from weft.launch.fetch import fetch_initial, fetch_run
from weft.launch.peer import members_of, snapshot_of
from weft.launch.session import Footing, Options, footing, open_for, who_keep
from weft.launch.succession import charter_at, require_going, require_unended
from weft.net.admission import Admission, new_secret
from weft.net.node import Node
from weft.net.ticket import read
from weft.peer.peer import Context, Outcome, Peer
from weft.peer.state.checkpoint import Snapshot
from weft.run.config import FrozenConfig, Genesis, LoopConfig, SyncConfig, TensorConfig
from weft.run.genesis import MAX_RUN_NBYTES, initial, read_run
from weft.run.outline import admission_of, public
from weft.store.chunks import raw
from weft.store.home import Home
from weft.store.tickets import keep_secret, read_secret
from weft.sync.merge.coding import require
from weft.sync.method.presets import spell_out
from weft.training.device import check_fits_loop
from weft.training.learner import Learner

OnStarted = Callable[[Peer, str], None]


@dataclass(frozen=True)
class Loop:
    """What a process trains in a loop of its own."""

    tensors: tuple[TensorConfig, ...]
    frozen: tuple[FrozenConfig, ...]
    vector: Float32[Tensor, " num"]  # the tensors' values, as the model was built
    check: Callable[[LoopConfig], None]  # raises where the run's tensors are others
    make_learner: Callable[[Genesis, Emit, Clock], Learner]


async def found(
    config: SyncConfig, loop: Loop, options: Options, *, wait_for: int = 1, on_started: OnStarted
) -> Outcome:
    """Make the run that `config` describes, or go on with it where this machine's checkpoint stands.

    Args:
        wait_for: begin once so many peers are here, this one included.
        on_started: told the peer and a fresh ticket once others can join.
    """
    sealed, is_kept = await asyncio.to_thread(_seal, config, loop, options)
    with footing(options, sealed.run, open_for(options, sealed.run, is_maker=True)) as ground:
        if is_kept:
            ground.emit(Notice(text=f"going on with run {short(sealed.run)}, which this machine has made before"))
        secret = read_secret(ground.folder) or new_secret()
        admission = admission_of(sealed.admission, sealed.stewards, secret)
        require_unended(ground.folder, sealed.run)
        async with aclosing(Threads()) as compute, ground.node(admission) as node:
            standing = await _stand(ground, node, sealed, admission)
            peer = Peer(sealed, standing.place(loop, compute))
            with ground.ticket(node, admission, peer.knows_anchor) as ticket:
                async with ground.guarded(peer):
                    on_started(peer, ticket)
                    return await peer.found(wait_for=wait_for, snapshot=standing.snapshot)


async def join(
    ticket_text: str, config: SyncConfig | None, loop: Loop, options: Options, *, on_started: OnStarted
) -> Outcome:
    """Join the run that the ticket names.

    Args:
        config: what the run is expected to be; None: whatever it is.

    Raises:
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered and there is no checkpoint, or nobody let this peer in.
        GenesisMismatch: the run's tensors are others.
        ConfigError: the run is not what `config` says, or of another kind.
    """
    ticket = read(ticket_text)
    with footing(options, ticket.run, open_for(options, ticket.run, is_maker=False)) as ground:
        require_unended(ground.folder, ticket.run)
        async with aclosing(Threads()) as compute, ground.node(ticket.admission()) as node:
            for contact in ticket.contacts:
                if contact.peer != node.peer:
                    node.remember(contact.peer, contact.addresses, contact.name)
            members = await members_of(node, ticket, ground)
            run = _of_loops(await fetch_run(node, members, options.home, options.settings.max_parameters))
            loop.check(run)
            if config is not None:
                _require_expected(run, config)
            require_going(ticket.run, await charter_at(node, members[0]) if members else None)
            check_fits_loop(run, options.settings)
            ground.day.require(4 * run.num_parameters)
            admission = admission_of(run.admission, run.stewards, ticket.secret)
            node.admit(admission)
            await fetch_initial(node, members, run, options.home)
            standing = await _stand(ground, node, run, admission)
            peer = Peer(run, standing.place(loop, compute))
            with ground.ticket(node, admission, peer.knows_anchor) as fresh:
                async with ground.guarded(peer):
                    on_started(peer, fresh)
                    return await peer.join(snapshot=standing.snapshot)


# --- pieces ---


@dataclass(frozen=True)
class _Standing:
    """What a peer of such a run stands on, before it is made."""

    ground: Footing
    node: Node
    run: LoopConfig
    vector: Tensor
    snapshot: Snapshot | None

    def place(self, loop: Loop, compute: Compute) -> Context:
        ground, clock = self.ground, SystemClock()
        return Context(
            node=self.node,
            identity=ground.identity,
            folder=ground.folder,
            settings=ground.options.settings,
            data=None,
            initial=self.vector,
            clock=clock,
            compute=compute,
            emit=ground.emit,
            make_learner=lambda emit: loop.make_learner(self.run, emit, clock),
        )


async def _stand(ground: Footing, node: Node, run: LoopConfig, admission: Admission) -> _Standing:
    home = ground.options.home
    keep_secret(ground.folder, admission)
    node.passport.predecessor = run.predecessor
    node.serve_blobs(public(run, run.run, home), is_patient=True)
    vector = await asyncio.to_thread(initial, run, home)
    if vector is None:
        raise ConfigError("the run's initial weights could not be had. Ask a member for a fresh ticket.")
    snapshot = await snapshot_of(ground.folder, run, ground.options.settings)
    return _Standing(ground, node, run, vector, snapshot)


def _seal(config: SyncConfig, loop: Loop, options: Options) -> tuple[LoopConfig, bool]:
    """Return the run, and whether this machine has made it before; all that peers may fetch is in the home then."""
    home, limit = options.home, options.settings.max_parameters
    sealed = _sealed(config, loop.tensors, loop.frozen, wire.digest(raw(loop.vector)))
    require(sealed.method)
    read_run(wire.encode(sealed), limit)  # what others would refuse is refused here, where it can still be changed
    check_fits_loop(sealed, options.settings)
    kept = _kept(sealed, home, limit)
    if kept is not None:
        return kept, True
    home.blobs.put(raw(loop.vector))
    home.blobs.put(wire.encode(sealed))
    return sealed, False


def _sealed(
    config: SyncConfig, tensors: tuple[TensorConfig, ...], frozen: tuple[FrozenConfig, ...], initial: Digest
) -> LoopConfig:
    fields = {name: getattr(config, name) for name in config.__struct_fields__ if name not in ("peers", "method")}
    fields["stewards"] = tuple(sorted(set(config.stewards)))
    method = spell_out(config.method, config.peers)
    return LoopConfig(**fields, method=method, tensors=tensors, frozen=frozen, initial=initial)


def _kept(sealed: LoopConfig, home: Home, max_parameters: int) -> LoopConfig | None:
    """Return the newest run with a checkpoint here that is `sealed` but for the values it began with."""
    found: list[tuple[float, LoopConfig]] = []
    folder = home.root / "runs"
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(ConfigError, DataError):  # another version's, or damaged: not this one
            data = home.blobs.read(Digest(path.name), MAX_RUN_NBYTES)
            run = None if data is None else read_run(data, max_parameters)
            if isinstance(run, LoopConfig) and msgspec.structs.replace(run, initial=sealed.initial) == sealed:
                keepers = who_keep(RunId(path.name), home)
                found += [(_changed_at(keeper), run) for keeper in keepers]
    return max(found, key=lambda each: each[0])[1] if found else None


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime


def _of_loops(run: Genesis) -> LoopConfig:
    if not isinstance(run, LoopConfig):
        raise ConfigError(f"run {run.name!r} trains a transformer of weft's: join it with `weft join TICKET`.")
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
