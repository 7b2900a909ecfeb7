"""Letters and decisions of others, kept until this peer knows the head of its branch."""

from contextlib import suppress

from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.node import Node
from weft.peer.messages import Decision, Letter
from weft.peer.round.driver import RoundDriver

MAX_EARLY = 256  # kept while this peer still fetches the state


class Mailbox:
    def __init__(self, node: Node) -> None:
        self._rounds: RoundDriver | None = None
        self._early: list[tuple[PeerId, Letter | Decision]] = []
        node.on_note(Letter, self._on_letter)
        node.on_note(Decision, self._on_decision)

    def open(self, rounds: RoundDriver) -> None:
        """Give `rounds` what has come, and what comes from now on."""
        early, self._early, self._rounds = self._early, [], rounds
        for peer, said in early:
            with suppress(PeerError):  # its sender's fault, long ago
                self._give(rounds, peer, said)

    async def _on_letter(self, peer: PeerId, letter: Letter) -> None:
        self._take(peer, letter)

    async def _on_decision(self, peer: PeerId, decision: Decision) -> None:
        self._take(peer, decision)

    def _take(self, peer: PeerId, said: Letter | Decision) -> None:
        if self._rounds is not None:
            self._give(self._rounds, peer, said)
        else:
            self._early = [*self._early, (peer, said)][-MAX_EARLY:]

    def _give(self, rounds: RoundDriver, peer: PeerId, said: Letter | Decision) -> None:
        if isinstance(said, Letter):
            rounds.inbox.on_letter(peer, said)
        else:
            rounds.on_decision(said)
