"""Says who strays from the others, and that nobody learns. It decides nothing: a person may.

    loss      what members tell of their inner steps with each heartbeat: their word
    update    the length of what they bring, of a delta by the tokens in it to the power of 3/4: measured by this peer,
              on the part that it merges, once decoded; or of what its neighbours bring, in lengths of its own

A member that computes on garbage, or with other rates than the run's, shows in both; one that lies about its loss shows
in the second alone. What has a legacy or a group in it is not measured: it is the work of several. Neither is,
where members exchange with neighbours, what is mixed with others' work (`Merging`). In lengths of this peer's own,
since each meets others in other rounds, in which rates are others.

It does not know why.
"""

import math
from collections.abc import Callable

from weft.events import Emit, MemberStrays, NotLearning
from weft.ids import PeerId, Round
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.peer.loop.outliers import Band, Progress, Strayed
from weft.sync.method.choices import Choices
from weft.sync.records.messages import Contribution, Manifest

LOSS_SHARE = 0.3  # of the others' loss: batches differ, and so do members' rounds
# How the length of a delta grows with its tokens: by the power of 1 where steps point the same way, of 1/2 where they
# point to all sides. So a lease may be 250 times as large as another, and who has it is not outside.
GROWTH = 0.75
TIMES = 4.0  # as long as the others' or as short: that much have leases of other sizes
# The same where rounds wait for nobody: members have made many steps or few, and AdamW's lengths differ by it. One nine
# times as fast as another brought up to 12 times as much, on a part of rows that no text reaches.
TIMES_AGED = 16.0


class Sentinel:
    """Of one peer.

    Args:
        heartbeat: returns this peer's own.
        method: of the run.
    """

    def __init__(self, peer: PeerId, emit: Emit, heartbeat: Callable[[], Heartbeat], method: Choices) -> None:
        self._peer = peer
        self._emit = emit
        self._heartbeat = heartbeat
        self._losses = Band(share=LOSS_SHARE)
        self._lengths = Band(width=math.log(TIMES if method.wait == "all" else TIMES_AGED))
        self._is_sum = method.send != "gradient"  # of steps: the more, the longer
        self._has_neighbours = method.graph is not None
        self._progress = Progress()
        self._told: dict[PeerId, tuple[Round, float]] = {}  # the last that each told, and in which round
        self._measured: tuple[Round, dict[PeerId, float]] = (Round(0), {})  # logarithms, of the round that is merged
        self._round = Round(0)  # of the last look

    def merged(self, round: Round, contribution: Contribution, length: float, is_whole: bool = False) -> None:
        """Take up how long a contribution is in the part that this peer merges.

        Args:
            is_whole: it is that of a neighbour, or this peer's own to them.
        """
        if is_whole != self._has_neighbours:  # a mean of what neighbours have mixed
            return
        if contribution.legacy is not None or contribution.group is not None or not (contribution.tokens and length):
            return
        if self._measured[0] != round:  # the one before is whole
            self._say("update", self._lengths.take(self._comparable(self._measured[1])), math.exp)
            self._measured = round, {}
        unit = contribution.tokens**GROWTH if self._is_sum else 1.0
        self._measured[1][contribution.peer] = math.log(length / unit)

    def _comparable(self, lengths: dict[PeerId, float]) -> dict[PeerId, float]:
        if not self._has_neighbours:
            return lengths
        own = lengths.get(self._peer)
        return {} if own is None else {peer: length - own for peer, length in lengths.items()}

    def look(self, head: Manifest, membership: Membership, tokens: int) -> None:
        """Take up what members tell.

        Args:
            tokens: of the whole run.
        """
        for band in (self._losses, self._lengths):
            band.keep(head.members)
        self._told = {peer: told for peer, told in self._told.items() if peer in head.members}
        beats = {peer: membership.heartbeat_of(peer) for peer in head.members} | {self._peer: self._heartbeat()}
        self._say("loss", self._losses.take(self._news(beats)), float)
        usual, is_new, self._round = self._losses.usual(len(head.members)), head.round != self._round, head.round
        if usual is None or not is_new:
            return
        if stalled := self._progress.take(head.round, head.committed_tokens / tokens, usual):
            counted, first, now = head.committed_tokens, stalled.first, stalled.now
            self._emit(NotLearning(round=head.round, committed_tokens=counted, first_loss=first, loss=now))

    def _news(self, beats: dict[PeerId, Heartbeat | None]) -> dict[PeerId, float]:
        """Return the losses that were not told before."""
        found = {}
        for peer, beat in beats.items():
            if beat is None or beat.loss is None or not math.isfinite(beat.loss):
                continue
            if self._told.get(peer) != (told := (beat.round, beat.loss)):
                self._told[peer] = told
                found[peer] = beat.loss
        return found

    def _say(self, what: str, changes: list[Strayed], unit: Callable[[float], float]) -> None:
        for each in changes:
            self._emit(
                MemberStrays(
                    member=each.peer,
                    round=self._round,
                    what=what,
                    value=unit(each.value),
                    usual=unit(each.usual),
                    is_back=each.is_back,
                )
            )
