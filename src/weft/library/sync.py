"""`weft.Sync`: a training loop of somebody's own as a peer of a run.

    with weft.Sync(model, weft.SyncConfig(samples=1_000_000, batch_size=32)) as sync:    # or ticket="weft2..."
        for batch in loader:
            loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
            if not sync.step(len(batch), loss):
                break

The loop stays in its thread. The peer lives in another, with the event loop of all peers: the same rounds, membership,
state and checkpoints as `weft train`. `step` hands an inner step in, and returns when the next may be made: at once in
the middle of a lease, after the round at its end, with the parameters that all agreed on in the model.

Failure:
- other members come, leave, die, are slow: rounds go on with who is there.
- this peer cannot go on (removed, disk full, parameters that are not finite): `step` and `finish` raise why.
- the loop raises, or is interrupted: the peer says goodbye, saves, and the exception goes on. The model stays as it is.
- the script ends without `with` or `finish`: as if it were interrupted, at the exit of Python.
- this process is killed: started again, it goes on from its last checkpoint. The optimizer's state is the loop's own.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType, TracebackType
from typing import Self
from weakref import ref

from torch import Tensor, nn

from weft.config import said, told_idle
from weft.errors import ConfigError
from weft.launch.kept import Wish
from weft.launch.loop import Loop
from weft.library import given
from weft.library.learner import Lending, LoopLearner
from weft.library.tensors import Tensors, require_same
from weft.library.thread import PeerThread, RoundTimes, at_exit, hand_in
from weft.peer.peer import Outcome, Peer
from weft.run.config import SyncConfig
from weft.run.idle import of_loop
from weft.sync.records.messages import Manifest

NOT_STARTED = "weft.Sync has not started: use it as `with weft.Sync(...) as sync`, or call start()"


class Sync:
    """A peer that a loop trains for.

    Args:
        model: a module, of which the parameters that require gradients are trained, and the others must have equal
            values on all members; or tensors by name, which all are trained. Any device, any float dtype.
        config: the run to found, or its TOML file. With a ticket: what the run is expected to be, or None.
        ticket: of the run to join; None: found one, or go on with it where this home holds a checkpoint of it.
        wait_for: with which a founded run begins: so many peers, this one included.
        wish: where the home holds a run of that name which differs: "go on" with it, by what config says now; begin
            "new" beside it, with the model's parameters as they are; or "ask", where `start` raises ConfigError and
            says what differs.
        machine: home, identity, network, caps; None: as `weft train` has them.
        on_ticket: told the ticket of a run that is founded, from another thread. Printed to standard error by default.
        on_terms: told in one line what joining costs this machine, before anything is fetched, from another thread;
            what it raises, `start` raises, and nothing is joined. Printed to standard error by default.

    Raises:
        ConfigError: something that weft cannot do is in a file or an argument; a model with nothing to train; or a
            process that is one rank of several of torch.distributed.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        config: SyncConfig | str | Path | None = None,
        *,
        ticket: str | None = None,
        wait_for: int = 1,
        wish: Wish = "ask",
        machine: given.Machine | None = None,
        on_ticket: Callable[[str], object] = given.show_ticket,
        on_terms: Callable[[str], object] = given.show_terms,
    ) -> None:
        if config is None and ticket is None:
            raise ConfigError('weft.Sync needs a config, to found a run, or ticket="...", to join one.')
        given.require_one_process()
        given.require_kind(ticket, (str, NoneType), "ticket", "a str, as a member printed it, or None")
        given.require_kind(
            machine, (given.Machine, NoneType), "machine", "a weft.Machine(home=..., settings=...), or None"
        )
        given.require_members(wait_for)
        given.require_wish(wish)
        self._wish = wish
        self._on_terms = on_terms
        self._config = None if config is None else given.config_of(config, SyncConfig, "config")
        self._times = RoundTimes()
        options = (machine or given.Machine()).options()
        options = replace(options, sinks=(*options.sinks, self._times))
        self._notes = list(given.notes_on(options.settings, "loop", ticket, wait_for, wish))
        if self._config is not None:
            self._notes += told_idle("config", said(self._config), of_loop(self._config))
        self._tensors = Tensors(model)
        self._lending = Lending()
        self._thread = PeerThread[Peer](options, ticket, wait_for, on_ticket, self._lending.end)
        self._has_settled = False

    # --- what a loop calls ---

    def start(self) -> None:
        """Found or join, and return when the first step may be made, with the run's parameters in the model.

        Raises:
            WeftError: as `weft.launch.peer`: the run, the ticket, the network, or a model that is not the run's.
            RuntimeError: it was started before, which goes on as it was.
        """
        if self._thread.is_alive():
            raise RuntimeError("weft.Sync has started already: go on with step(), or end it with finish()")
        if self._thread.ident is not None or self._lending.has_left:
            raise RuntimeError("weft.Sync has ended: make another to go on from where the others are then")
        try:
            at_exit(partial(_close, ref(self)))
            self._thread.begin(self._work())
            self._lending.begin()
        except BaseException as error:
            self.close(error)
            raise
        self._thread.raise_failure()

    def step(self, num_samples: int | None = None, loss: float | Tensor | None = None) -> bool:
        """Hand in the inner step that was just made, and return once another may be made.

        Args:
            num_samples: that it was made on, by which its work is weighed; None: the run's `batch_size`.
            loss: of it, for people to look at.

        Returns:
            Whether the run goes on. False: it is complete, or this peer had to leave (`outcome` says which), and the
            model holds the parameters of the last round.

        Raises:
            ConfigError: more samples than the run's `batch_size`, or none; a loss that is no number; or other
                parameters of the module are trained than when this was made.
            WeftError: the peer cannot go on.
        """
        peer = self._thread.peer
        if peer is None:
            raise RuntimeError(NOT_STARTED)
        most = peer.replica.charter.settings.batch_size
        samples = most if num_samples is None else given.whole(num_samples)
        if not 0 < samples <= most:
            raise ConfigError(
                f"step: num_samples is {num_samples}, and one step may have at most the run's batch_size, {most}. Make "
                "smaller steps, or a run with a larger batch_size."
            )
        if self._lending.is_last:  # the parameters are about to be read: often enough, and no longer in between
            given.require_one_process()
            self._tensors.require_unchanged()
        goes_on = self._lending.made(samples, given.shown(loss))
        if not goes_on:
            self._settle()
        return goes_on

    def finish(self) -> Outcome:
        """Hand in what is left, leave with a goodbye, and put the parameters of the last round into the model.

        What was made since the last round is counted in the next one, which is waited for: twice as long as rounds took
        here, 60 s at least. What is not counted by then is in the checkpoint, and a Notice says how much. Called again,
        it returns the same.

        Raises:
            WeftError: the peer could not go on.
            RuntimeError: it has not started.
        """
        if self._thread.ident is None:
            raise RuntimeError(NOT_STARTED)
        self._lending.leave()
        if (peer := self._thread.peer) is not None:
            self._thread.call(lambda: asyncio.ensure_future(hand_in(peer, self._times)))
        while self._thread.is_alive():
            self._thread.join(1.0)  # not for ever: some systems deliver no signal meanwhile
        self._settle()
        assert self.outcome is not None
        return self.outcome

    def close(self, error: BaseException | None = None) -> None:
        """Leave with a goodbye because of `error`: nothing is handed in, and the model stays as it is."""
        self._lending.leave()
        self._thread.leave("stopped" if error is None else type(error).__name__)
        if self._thread.ident is not None:
            self._thread.see_off()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.close(error)

    # --- what it can look at ---

    @property
    def ticket(self) -> str | None:
        """A fresh one, once others can join."""
        return self._thread.ticket

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, once it has."""
        return self._thread.outcome

    @property
    def _head(self) -> Manifest | None:
        return None if self._thread.peer is None else self._thread.peer.head

    @property
    def round(self) -> int:
        """The round whose outer step this peer has made last."""
        return 0 if self._head is None else self._head.round

    @property
    def samples(self) -> int:
        """Samples of all members that rounds have counted."""
        return 0 if self._head is None else self._head.committed_tokens

    @property
    def progress(self) -> float:
        """How far the run is, from 0 to 1: for a schedule that is the same for who comes later."""
        peer = self._thread.peer
        return 0.0 if peer is None else min(1.0, self.samples / peer.replica.charter.settings.tokens)

    @property
    def num_members(self) -> int:
        """Members after the last round, this one included."""
        return 0 if self._head is None else len(self._head.members)

    # --- pieces ---

    def _work(self) -> Loop:
        return Loop(
            config=self._config,
            wish=self._wish,
            notes=self._notes,
            on_terms=self._on_terms,
            tensors=self._tensors.configs,
            frozen=self._tensors.frozen,
            vector=self._tensors.read(),
            check=lambda run: require_same(run, self._tensors),
            make_learner=lambda run, emit, clock: LoopLearner(run, self._tensors, self._lending, emit, clock),
        )

    def _settle(self) -> None:
        """Raise what ended the peer, or put the parameters of the last round into the model, once."""
        self._thread.join()
        self._thread.raise_failure()
        if not self._has_settled and self._thread.peer is not None:
            self._has_settled = True
            self._tensors.write(self._thread.peer.replica.outer)


def _close(sync: "ref[Sync]") -> None:
    if (mine := sync()) is not None:
        mine.close()
