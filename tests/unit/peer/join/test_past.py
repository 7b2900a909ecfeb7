"""What a peer believes of the rounds before its own: told in order, and no more than it asked for."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from unit.store.test_rounds import MEMBERS, OPENING, RUN, chain, following, header, kept, milestone_of
from weft.clock import VirtualClock
from weft.errors import PeerError, WireError
from weft.ids import PeerId, Round
from weft.peer.join.past import PastRounds
from weft.peer.messages import RoundsAnswer, RoundsRequest
from weft.store.rounds import RoundsFile
from weft.tasks import Inline

ROUNDS = [*(first := chain(4, MEMBERS)), following(first[-1], left=MEMBERS[2:])]
while len(ROUNDS) < 9:
    ROUNDS.append(following(ROUNDS[-1]))
HEAD = ROUNDS[7]


class Others:
    """Peers that answer what a test says."""

    def __init__(self, answers: dict[PeerId, Any]) -> None:
        self.answers = answers
        self.peers = tuple(answers)
        self.asked: list[tuple[PeerId, RoundsRequest]] = []

    async def call(self, peer: PeerId, request: RoundsRequest, _kind: type, *, deadline_s: float) -> RoundsAnswer:
        self.asked.append((peer, request))
        answer = self.answers[peer]
        if isinstance(answer, Exception):
            raise answer
        found: RoundsAnswer = answer(request)
        return found


def past_of(path: Path, others: Others) -> PastRounds:
    past: Any = object.__new__(PastRounds)  # what stands around it is of no concern here
    past._node, past._compute, past._file, past._is_on = others, Inline(), RoundsFile(path), True
    past._replica = SimpleNamespace(run=SimpleNamespace(run=RUN), head=HEAD)
    past._asking = set()
    past._file.put(HEAD, None)
    found: PastRounds = past
    return found


def honest(folder: Path) -> Any:
    """Return what a peer answers that was there from the first round on."""
    peer = past_of(folder / "other.db", Others({}))
    peer._file = kept(folder / "honest.db", ROUNDS)
    return peer._found


def is_filled(past: PastRounds) -> bool:
    found = list[bool]()

    async def main() -> None:
        found.append(await past._is_filled())

    VirtualClock().run(main())
    return found[0]


def test_all_rounds_before_are_asked_of_who_tells_them(tmp_path: Path) -> None:
    silent, liar, true = (PeerId(digit * 64) for digit in "abc")
    lie = b"".join(map(header, [*ROUNDS[:5], following(ROUNDS[4], num_counted=1), ROUNDS[6]]))
    lies = RoundsAnswer(opening=OPENING, headers=lie, milestones=())
    others = Others({silent: PeerError("it does not answer"), liar: lambda _request: lies, true: honest(tmp_path)})
    past = past_of(tmp_path / "mine.db", others)
    assert is_filled(past)
    assert {peer for peer, _ in others.asked} == {silent, liar, true}
    assert past._file.is_whole(RUN, HEAD)
    assert past._file.newest() == HEAD.round  # and nothing of what came after


def again(_request: RoundsRequest) -> RoundsAnswer:
    return RoundsAnswer(opening=OPENING, headers=b"", milestones=(milestone_of(ROUNDS[4], MEMBERS),))


def endless(request: RoundsRequest) -> RoundsAnswer:
    """Answer with milestones of rounds without end."""
    later = replace(ROUNDS[4], round=Round(request.after + 1))
    return RoundsAnswer(opening=OPENING, headers=b"", milestones=(milestone_of(later),))


@pytest.mark.parametrize(
    "answer", [again, endless, lambda _request: RoundsAnswer(opening=None, headers=b"", milestones=())]
)
def test_who_tells_the_same_or_too_much_is_asked_no_more(tmp_path: Path, answer: Any) -> None:
    peer = PeerId("a" * 64)
    others = Others({peer: answer})
    past = past_of(tmp_path / "mine.db", others)
    assert not is_filled(past)
    assert len(others.asked) <= HEAD.round + 2
    assert past._file.num() == 1


def test_one_request_of_a_peer_is_answered_at_a_time(tmp_path: Path) -> None:
    past: Any = past_of(tmp_path / "mine.db", Others({}))
    past._file = kept(tmp_path / "all.db", ROUNDS)
    request, peer = RoundsRequest(start=0, after=0), PeerId("a" * 64)

    async def main() -> None:
        whole = await past._answer(peer, request)
        assert (len(whole.headers), len(whole.milestones)) == (136 * len(ROUNDS), 2)
        past._asking.add(peer)
        assert await past._answer(peer, request) == RoundsAnswer(opening=None, headers=b"", milestones=())

    VirtualClock().run(main())


def test_asking_for_what_is_no_round_is_answered_with_nothing(tmp_path: Path) -> None:
    found = honest(tmp_path)(RoundsRequest(start=1 << 50, after=1 << 50))
    assert (found.headers, found.milestones) == (b"", ())


def test_an_answer_out_of_order_is_refused(tmp_path: Path) -> None:
    past = past_of(tmp_path / "mine.db", Others({PeerId("a" * 64): again}))

    async def main() -> None:
        with pytest.raises(WireError, match="in order"):
            await past._told(PeerId("a" * 64), HEAD)

    asyncio.run(main())
