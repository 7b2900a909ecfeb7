"""What a team makes of members that die, fall silent, or hand over what nobody expects."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from torch import Tensor

from unit.pipeline.split.crew import PATIENCE_S, TEAM, Crew
from weft.errors import CallFailed, DeadlineExceeded, NotFinite, PayloadError, PeerError
from weft.ids import Digest
from weft.pipeline.link import parcel
from weft.pipeline.split.exchange import Exchange
from weft.pipeline.split.messages import MAX_WAITING, HandedOver, HasTaken
from weft.pipeline.split.team import Team

ZEROS = torch.zeros(2, 6)


def numbers(number: int) -> Tensor:
    return torch.full((2, 6), float(number + 1))


def members(crew: Crew, act: Callable[[int, Exchange], Awaitable[object]]) -> list[object]:
    """Let each member do its part in the team; return what it returned or raised."""
    results: list[object] = []

    async def one(number: int) -> object:
        async with crew.exchange(number) as exchange:
            return await act(number, exchange)

    async def play() -> None:
        results.extend(await asyncio.gather(*map(one, range(len(crew.nodes))), return_exceptions=True))
        await asyncio.sleep(1.0)  # calls that were given up are told so
        assert all(exchanges.slots == {} and exchanges.joined == {} for exchanges in crew.exchanges)

    crew.run(play)
    return results


@pytest.mark.parametrize("num", [2, 3, 5])
def test_a_sum_is_the_same_at_all_and_in_the_order_of_members(num: int) -> None:
    crew = Crew(num)
    torch.manual_seed(0)
    made = torch.randn(num, 2, 6) * torch.tensor([1e4, 1.0, 1e-3, 7.0, 1e2])[:num].view(-1, 1, 1)
    by_hand = made[0].clone()
    for each in made[1:]:
        by_hand = by_hand + each

    async def act(number: int, exchange: Exchange) -> Tensor:
        return await Team(exchange, crew.compute.train).sum(lambda: made[number], onto=ZEROS)

    assert all(torch.equal(found, by_hand) for found in members(crew, act))  # type: ignore[arg-type]


def test_what_is_shifted_comes_from_the_member_before() -> None:
    crew = Crew(3)

    async def act(number: int, exchange: Exchange) -> float:
        team = Team(exchange, crew.compute.train)
        taken = await team.shift(team.pack(torch.full((number + 1,), float(number))), (number - 1) % 3 + 1)
        return float(team.unpack(taken, (number - 1) % 3, ZEROS).mean())

    assert members(crew, act) == [2.0, 0.0, 1.0]


def test_who_comes_late_finds_what_was_handed_over() -> None:
    crew = Crew(2)
    found: list[Tensor] = []

    async def one(number: int) -> None:
        await asyncio.sleep(5.0 * number)
        async with crew.exchange(number) as exchange:
            found.append(await Team(exchange, crew.compute.train).sum(lambda: numbers(number), onto=ZEROS))

    async def play() -> None:
        await asyncio.gather(one(0), one(1))

    crew.run(play)
    assert all(torch.equal(each, torch.full((2, 6), 3.0)) for each in found)


@pytest.mark.parametrize("num", [2, 4])
def test_a_member_that_dies_is_a_peer_error_at_once_at_all_others(num: int) -> None:
    crew = Crew(num)

    async def act(number: int, exchange: Exchange) -> object:
        team = Team(exchange, crew.compute.train)
        await team.sum(lambda: numbers(number), onto=ZEROS)
        if number == num - 1:
            crew.network.kill(crew.nodes[number].peer)
            await asyncio.sleep(1e-3)
            return None
        began = crew.clock.now()
        try:
            return await team.sum(lambda: numbers(number), onto=ZEROS)
        finally:
            assert crew.clock.now() - began < 1.0

    *others, _ = members(crew, act)
    assert all(isinstance(error, PeerError) for error in others), others


def test_a_silent_member_is_waited_for_so_long_and_no_longer() -> None:
    crew = Crew(3)

    async def act(number: int, exchange: Exchange) -> object:
        if number == 1:
            return await asyncio.sleep(3 * PATIENCE_S)
        began = crew.clock.now()
        try:
            return await Team(exchange, crew.compute.train).sum(lambda: numbers(number), onto=ZEROS)
        finally:
            assert PATIENCE_S <= crew.clock.now() - began < PATIENCE_S + 1.0

    first, _, last = members(crew, act)
    assert {type(first), type(last)} <= {DeadlineExceeded, PeerError, CallFailed}
    assert isinstance(first, DeadlineExceeded) or isinstance(last, DeadlineExceeded)


def test_who_fails_tells_the_others_before_they_lose_patience() -> None:
    crew = Crew(3)

    async def act(number: int, exchange: Exchange) -> object:
        team = Team(exchange, crew.compute.train)
        if number == 1:
            return await team.sum(lambda: numbers(number) * float("nan"), onto=ZEROS)
        began = crew.clock.now()
        try:
            return await team.sum(lambda: numbers(number), onto=ZEROS)
        finally:
            assert crew.clock.now() - began < 1.0

    first, ill, last = members(crew, act)
    assert isinstance(ill, NotFinite)
    for error in (first, last):
        assert isinstance(error, PeerError)
        assert "undivided" in str(error) or "left the team" in str(error)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (torch.zeros(13).numpy().tobytes(), "hands over 52 bytes"),
        (torch.zeros(11).numpy().tobytes(), "hands over 44 bytes"),
        (torch.full((12,), float("nan")).numpy().tobytes(), "NaN or infinity"),
        (torch.full((12,), float("-inf")).numpy().tobytes(), "NaN or infinity"),
    ],
    ids=["too long", "too short", "nan", "infinite"],
)
def test_what_is_no_numbers_of_this_length_is_a_payload_error(sent: bytes, why: str) -> None:
    crew = Crew(2)

    async def act(number: int, exchange: Exchange) -> object:
        if number == 1:
            return await exchange.give(0, 0, parcel(sent))
        return await Team(exchange, crew.compute.train).sum(lambda: numbers(number), onto=ZEROS)

    found, _ = members(crew, act)
    assert isinstance(found, PayloadError)
    assert why in str(found)


def test_what_is_handed_over_twice_or_by_a_stranger_counts_not() -> None:
    crew = Crew(3)
    pair = [crew.nodes[0].peer, crew.nodes[1].peer]

    async def play() -> None:
        link = crew.exchanges[2].link
        note = HandedOver(team=TEAM, number=0, digest=Digest("00" * 32), nbytes=48)
        foreign = asyncio.ensure_future(link.call(pair[0], note, HasTaken, deadline_s=5.0))
        await asyncio.sleep(1.0)
        with pytest.raises(CallFailed, match="twice"):
            await link.call(pair[0], note, HasTaken, deadline_s=5.0)

        async def one(number: int) -> Tensor:
            async with Exchange(crew.exchanges[number], TEAM, pair) as exchange:
                return await Team(exchange, crew.compute.train).sum(lambda: numbers(number), onto=ZEROS)

        for found in await asyncio.gather(one(0), one(1)):
            assert torch.equal(found, torch.full((2, 6), 3.0))
        with pytest.raises(PeerError):
            await foreign

    crew.run(play)


def test_what_waits_here_of_one_peer_is_bounded() -> None:
    crew = Crew(2)

    async def play() -> None:
        link, target = crew.exchanges[1].link, crew.nodes[0].peer
        notes = [
            HandedOver(team=TEAM, number=number, digest=Digest("00" * 32), nbytes=4)
            for number in range(MAX_WAITING + 1)
        ]
        calls = [asyncio.ensure_future(link.call(target, note, HasTaken, deadline_s=5.0)) for note in notes]
        await asyncio.sleep(1.0)
        assert len(crew.exchanges[0].slots) == MAX_WAITING
        *waiting, refused = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, CallFailed)
        assert "nobody has asked for" in str(refused)
        assert all(isinstance(error, DeadlineExceeded) for error in waiting)
        await asyncio.sleep(1.0)  # calls that were given up are told so
        assert crew.exchanges[0].slots == {}

    crew.run(play)


def test_a_name_is_of_one_team_at_a_time() -> None:
    crew = Crew(2)

    async def play() -> None:
        async with crew.exchange(0):
            with pytest.raises(ValueError, match="already"):
                async with crew.exchange(0):
                    pass

    crew.run(play)
