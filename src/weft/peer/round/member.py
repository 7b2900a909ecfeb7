"""This peer as a member of the present round: what its machine hears, and what it says to the others.

who learns something ──► feed ──► machine ──► what it wants done, to who carries that out (`on_step`)
                         say  ──► signed, to other members
"""

from collections.abc import Callable, Iterable

from weft.ids import PeerId
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.messages import Decision, Gathered, Letter
from weft.peer.round.outcome import attempt_started
from weft.sync.records.messages import AnyRoundMessage, Base, Collect, RoundNote
from weft.sync.round import round as machine
from weft.sync.round.machine import Input, Output, State
from weft.sync.round.rules import Durable, leader
from weft.tasks import Tasks
from weft.wire import seal

OnStep = Callable[[State, tuple[Output, ...]], None]  # the state before, what is to be done


class Member:
    """Of the round after the chain's head, as long as this peer takes part in it.

    Args:
        tasks: what goes on beside the machine, for as long as this peer is in rounds.
    """

    def __init__(self, context: Context, chain: Chain, tasks: Tasks) -> None:
        self.peer = context.node.peer
        self.chain = chain
        self.tasks = tasks
        self.state: State | None = None  # None: takes no part in the round
        self.is_closed = False  # it takes part in none any more
        self._node = context.node
        self._identity = context.identity
        self._emit = context.emit
        self._on_step: list[OnStep] = []

    def on_step(self, callback: OnStep) -> None:
        """Call `callback(before, outputs)` whenever the machine has heard something."""
        self._on_step.append(callback)

    @property
    def base(self) -> Base:
        return self.chain.base

    @property
    def plan(self) -> Collect | None:
        """Return the plan that the machine follows, if it knows one."""
        return None if self.state is None else self.state.plan

    @property
    def leads(self) -> bool:
        return self.state is not None and leader(self.state.base, self.state.attempt) == self.peer

    def begin(self) -> None:
        """Enter the round."""
        self.state = machine.begin(self.peer, self.chain.base)

    def resume(self, durable: Durable) -> tuple[Output, ...]:
        """Enter it once more, bound by what was promised in it; return what is to be done."""
        self.state, outputs = machine.resume(self.peer, durable)
        return outputs

    def leave(self) -> None:
        """Take no part in the round."""
        self.state = None

    def end(self) -> None:
        """The round is over."""
        self.leave()
        self._node.exchange(False)

    def close(self) -> None:
        """Take part in no round any more."""
        self.is_closed, self.state = True, None

    def feed(self, event: Input) -> None:
        """Let the machine hear something, where this peer takes part in the round."""
        if (before := self.state) is None:
            return
        self.state, outputs = machine.step(before, event)
        self._node.exchange(self.state.plan is not None and len(before.base.electorate) > 1)
        if self.state.attempt != before.attempt:
            self._emit(attempt_started(self.state, event))
        for callback in self._on_step:
            callback(before, outputs)

    def say(self, to: Iterable[PeerId], message: AnyRoundMessage) -> None:
        """Say something in the present round."""
        note = RoundNote(branch=self.base.branch, round=self.base.round, message=message)
        self.post(to, Letter(signed=seal(self._identity, note)))

    def post(self, to: Iterable[PeerId], note: Letter | Decision | Gathered) -> None:
        """Send a note to other members."""
        for peer in to:
            if peer != self.peer:
                self._node.post(peer, note)
