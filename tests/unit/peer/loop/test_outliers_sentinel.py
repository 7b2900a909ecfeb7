"""What a sentinel measures and hears, and what it leaves out."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weft.events import Event, MemberStrays, NotLearning
from weft.ids import BranchId, PeerId, Round, Tokens
from weft.net.messages import Heartbeat
from weft.peer.loop.outliers import Sentinel
from weft.sync.method.presets import AsyncDiLoCoConfig, DdpConfig, FedAvgConfig, MethodConfig, NoLoCoConfig, spell_out
from weft.sync.records.messages import Contribution

PEERS = [PeerId(digit * 64) for digit in "abcd"]
SELF, ODD = PEERS[0], PEERS[3]


MERGER: Any = SimpleNamespace(on_added=lambda _callback: None)


class Heard:
    """Stands for the membership: what each member has told last."""

    def __init__(self) -> None:
        self.losses: dict[PeerId, float | None] = {}
        self.round = 0

    def heartbeat_of(self, peer: PeerId) -> Heartbeat | None:
        if peer not in self.losses:
            return None
        return Heartbeat(
            name="",
            branch=BranchId("f" * 64),
            round=Round(self.round),
            manifest=None,
            state="training",
            loss=self.losses[peer],
            tokens_per_s=1.0,
        )


class Watch:
    def __init__(self, method: MethodConfig | None = None) -> None:
        self.heard, self.events = Heard(), list[Event]()
        choices = spell_out(method or FedAvgConfig(), 4)
        self.sentinel = Sentinel(SELF, self.events.append, choices, MERGER)

    def _own(self) -> Heartbeat:
        found = self.heard.heartbeat_of(SELF)
        assert found is not None
        return found

    def merge(self, lengths: dict[PeerId, float], is_whole: bool = False, **more: Any) -> None:
        """Merge a round's contributions, of which the odd one has more to it."""
        self.heard.round += 1
        for peer, length in lengths.items():
            each = Contribution(peer=peer, tokens=Tokens(100), parts=())
            each = msgspec.structs.replace(each, **(more if peer == ODD else {}))
            self.sentinel.merged(Round(self.heard.round), each, length, is_whole)

    def tell(self, losses: dict[PeerId, float | None], members: list[PeerId] = PEERS, rounds: int = 10**9) -> None:
        """Tell losses after a round, of a run of so many."""
        self.heard.losses, self.heard.round = losses, self.heard.round + 1
        round = self.heard.round
        head: Any = SimpleNamespace(members=tuple(members), round=Round(round), committed_tokens=round)
        self.sentinel.look(head, self.heard, self._own(), rounds)  # type: ignore[arg-type]

    @property
    def strayed(self) -> set[tuple[PeerId, str]]:
        return {(event.member, event.what) for event in self.events if isinstance(event, MemberStrays)}


@pytest.mark.parametrize("power", [0.5, 1.0])  # steps that point to all sides, and to the same one
def test_a_lease_that_is_sixty_times_as_large_makes_nobody_stray(power: float) -> None:
    watch = Watch()
    for _ in range(12):
        watch.merge(alike(60.0**power), tokens=Tokens(60 * 100))
        watch.tell(dict.fromkeys(PEERS, 1.0))
    assert watch.strayed == set()


@pytest.mark.parametrize("tokens", [100 // 8, 8 * 100])
def test_who_makes_few_steps_on_a_busy_machine_is_not_named(tokens: int) -> None:
    """Where real members did, 28 times less came than the tokens tell, on rows that no text reaches."""
    length = (tokens / 100) ** 2.36
    watch, gossip = Watch(), Watch(NoLoCoConfig())
    for number in range(30):
        watch.merge(alike(length), tokens=Tokens(tokens))
        pair = {SELF: 1.0, PEERS[1 + number % 3]: 1.0} | ({ODD: length} if number % 3 == 2 else {})
        gossip.merge(pair, is_whole=True, tokens=Tokens(tokens))
    assert not watch.strayed | gossip.strayed


@pytest.mark.parametrize(("factor", "tokens"), [(30.0, 50), (1 / 30, 50), (10.0, 11), (1 / 10, 900)])
def test_who_makes_fewer_or_more_steps_at_another_rate_is_named(factor: float, tokens: int) -> None:
    watch = Watch()
    for _ in range(12):
        watch.merge(alike(factor * tokens / 100), tokens=Tokens(tokens))
    assert watch.strayed == {(ODD, "update")}


def test_a_few_rounds_of_few_steps_make_nobody_stray() -> None:
    """A member as fast as the others was named for an update of a sixteenth: its machine was busy for three rounds."""
    watch = Watch()
    for number in range(20):
        few = number in (10, 11, 12)
        watch.merge(alike(1 / 130 if few else 1.0), tokens=Tokens(12 if few else 100))
    assert not watch.strayed


def alike(odd: float) -> dict[PeerId, float]:
    return dict.fromkeys(PEERS, 1.0) | {ODD: odd}


def test_an_update_that_is_far_longer_or_shorter_is_measured() -> None:
    for odd in (9.0, 1 / 9):
        watch = Watch()
        for _ in range(12):
            watch.merge(alike(odd))
        assert watch.strayed == {(ODD, "update")}
        event = watch.events[0]
        assert isinstance(event, MemberStrays)
        assert event.value / event.usual == pytest.approx(odd)


@pytest.mark.parametrize(
    "more", [{"tokens": Tokens(0)}, {"group": True}, {"legacy": True}], ids=["newcomer", "group", "legacy"]
)
def test_what_is_no_single_peers_own_work_is_not_measured(more: dict[str, Any]) -> None:
    watch = Watch()
    for _ in range(12):
        watch.merge(alike(9.0), **more)
    assert not watch.strayed


def test_a_delta_of_many_tokens_may_be_long_and_a_gradient_may_not() -> None:
    deltas, gradients = Watch(), Watch(DdpConfig())
    for watch in (deltas, gradients):
        for _ in range(12):
            watch.merge(alike(5.0), tokens=Tokens(900))
    assert not deltas.strayed
    assert gradients.strayed == {(ODD, "update")}


def test_where_rounds_wait_for_nobody_lengths_may_differ_more() -> None:
    for odd, strayed in ((9.0, set()), (30.0, {(ODD, "update")})):
        watch = Watch(AsyncDiLoCoConfig())
        for _ in range(12):
            watch.merge(alike(odd))
        assert watch.strayed == strayed


def test_neighbours_are_measured_by_what_one_brings_oneself() -> None:
    for odd in (9.0, 1 / 9):
        watch = Watch(NoLoCoConfig())
        for number in range(30):  # another neighbour each time, while rates rise
            pair = {SELF: 1.0, PEERS[1 + number % 3]: 1.0} | ({ODD: odd} if number % 3 == 2 else {})
            watch.merge({peer: 1.4**number * length for peer, length in pair.items()}, is_whole=True)
        assert watch.strayed == {(ODD, "update")}
    watch = Watch(NoLoCoConfig())
    for number in range(30):
        watch.merge({SELF: 9.0, PEERS[1 + number % 3]: 1.0}, is_whole=True)
    assert watch.strayed == {(SELF, "update")}


def test_neighbours_are_not_measured_where_this_peer_brings_nothing_nor_in_what_all_have_mixed() -> None:
    absent, means = Watch(NoLoCoConfig()), Watch(NoLoCoConfig())
    for _ in range(20):
        absent.merge({peer: length for peer, length in alike(9.0).items() if peer != SELF}, is_whole=True)
        means.merge(alike(9.0))
    assert not absent.strayed | means.strayed


def test_a_loss_far_from_the_others_is_heard_also_of_oneself() -> None:
    for odd in (ODD, SELF):
        watch = Watch()
        for number in range(12):
            watch.tell(dict.fromkeys(PEERS, 3.0 - 0.01 * number) | {odd: 6.0 - 0.01 * number})
        assert watch.strayed == {(odd, "loss")}


def test_what_was_told_before_is_no_news() -> None:
    watch = Watch()
    for _ in range(5):
        watch.tell(dict.fromkeys(PEERS, 3.0))
    for _ in range(30):
        watch.heard.round = 5  # they tell the same again, as every two seconds
        watch.tell(dict.fromkeys(PEERS, 3.0) | {ODD: 6.0})
    assert not watch.strayed


def test_the_mean_of_a_round_that_is_under_way_makes_nobody_stray() -> None:
    """A run of three on a common text named members five times: one hard batch was the first of a round, the means of
    that round after it had it in them, and the next round began by telling the same mean again."""
    watch = Watch()
    for number in range(12):
        falling = 1.0 - 0.001 * number
        for share in (1.6, 1.5, 1.4):
            watch.tell(dict.fromkeys(PEERS, falling) | {ODD: share - 0.001 * number if number == 8 else falling})
            watch.heard.round -= 1
        watch.heard.round += 1
    assert not watch.strayed


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_is_none_judges_nobody(loss: float | None) -> None:
    watch = Watch()
    for _ in range(12):
        watch.tell({SELF: 3.0, PEERS[1]: 9.0, PEERS[2]: loss, ODD: loss})
    assert not watch.events


def test_who_is_no_member_any_more_is_no_longer_judged() -> None:
    watch = Watch()
    for number in range(30):
        watch.tell(dict.fromkeys(PEERS, 3.0 - 0.01 * number) | {ODD: 6.0}, PEERS[:3])
    assert not watch.strayed


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("rounds", [8, 19, 200])
def test_that_nobody_learns_is_said_of_few_members_and_of_few_rounds_too(num: int, rounds: int) -> None:
    learning, watch = Watch(), Watch()
    for number in range(1, rounds):
        watch.tell(dict.fromkeys(PEERS[:num], 5.0 + 0.1 * number), PEERS[:num], rounds)
        learning.tell(dict.fromkeys(PEERS[:num], 5.0 - 2.0 * number / rounds), PEERS[:num], rounds)
    (said,) = watch.events
    assert isinstance(said, NotLearning)
    assert said.num_members == num
    assert not learning.events


def test_of_two_members_both_are_heard_before_anything_is_said() -> None:
    watch = Watch()
    for number in range(1, 200):
        watch.tell({SELF: 5.0 + 0.1 * number, PEERS[1]: None}, PEERS[:2], 200)
    assert not watch.events
