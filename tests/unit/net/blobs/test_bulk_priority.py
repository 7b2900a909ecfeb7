"""What gives way to a round, by how much, and for how long."""

import asyncio
import itertools

from weft.clock import VirtualClock
from weft.net.blobs.bulk import PATIENT_NBYTES, QUIET_S, SHARE, STARVED_S, STUCK_S, Priority


async def flood(turns: Priority, sent: list[float]) -> None:
    """Send patient slices as fast as they may leave, on a line that takes 10 ms for each."""
    while True:
        await turns.may_send(PATIENT_NBYTES)
        await asyncio.sleep(0.01)
        sent.append(asyncio.get_running_loop().time())


def play(length_s: float, urgent: "list[tuple[float, float]]", slice_s: float = 0.01) -> list[float]:
    """Return when patient slices left beside exchanges of (begin, end) that send an urgent slice every `slice_s`."""
    clock, sent = VirtualClock(), list[float]()

    async def scenario() -> None:
        turns = Priority()
        flooding = asyncio.ensure_future(flood(turns, sent))
        for begin, end in urgent:
            await asyncio.sleep(begin - asyncio.get_running_loop().time())
            turns.exchange(True)
            with turns.urgent():
                while asyncio.get_running_loop().time() < end:
                    await asyncio.sleep(slice_s)
                    turns.moved(PATIENT_NBYTES)
            turns.exchange(False)
        await asyncio.sleep(length_s - asyncio.get_running_loop().time())
        flooding.cancel()

    clock.run(scenario())
    return sent


def test_where_no_round_exchanges_nothing_is_held_back() -> None:
    assert 995 <= len(play(10.0, [])) <= 1001


def test_while_one_does_patient_blobs_are_a_small_share_of_what_is_sent() -> None:
    during = [at for at in play(40.0, [(10.0, 30.0)]) if 10.1 < at < 30.0]
    assert 0.9 * 2000 / (SHARE - 1) <= len(during) <= 2000 / (SHARE - 1) + 3


def test_rounds_that_send_next_to_nothing_starve_nobody() -> None:
    clock, sent = VirtualClock(), list[float]()

    async def scenario() -> None:
        turns = Priority()
        turns.exchange(True)
        flooding = asyncio.ensure_future(flood(turns, sent))
        for _ in range(600):  # of a model of a few thousand parameters, round after round
            await asyncio.sleep(0.1)
            turns.moved(1000)
        flooding.cancel()

    clock.run(scenario())
    waits = [after - before for before, after in itertools.pairwise(sent)]
    assert 45 <= len(sent) <= 61
    assert max(waits) <= STARVED_S + 0.1


def test_after_a_moment_of_quiet_they_go_on() -> None:
    sent = play(40.0, [(10.0, 30.0)])
    assert [at for at in sent if 30.02 < at < 30.0 + QUIET_S] == []
    assert len([at for at in sent if at > 30.0 + QUIET_S]) > 850


def test_an_exchange_that_does_not_move_holds_nobody_back_for_long() -> None:
    sent = play(60.0, [(10.0, 50.0)], slice_s=40.0)
    assert len([at for at in sent if 10.02 < at < 10.0 + STUCK_S]) <= STUCK_S / STARVED_S
    assert len([at for at in sent if 10.0 + STUCK_S < at < 50.0]) > 2000


def test_one_peer_that_takes_nothing_does_not_keep_others_from_their_turn() -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        turns, served = Priority(), list[str]()

        async def blob(peer: str, for_s: float) -> None:
            async with turns.patient(peer):  # type: ignore[arg-type]
                await asyncio.sleep(for_s)
                served.append(peer)

        stuck = [asyncio.ensure_future(blob("stuck", 1e6)) for _ in range(8)]
        await asyncio.sleep(1)
        await blob("other", 1.0)
        assert served == ["other"]
        for task in stuck:
            task.cancel()

    clock.run(scenario())
