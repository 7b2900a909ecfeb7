"""To which members of a run without stages whoever asks is linked, and how much it may move."""

import asyncio
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from weft.clock import VirtualClock
from weft.errors import WeftError
from weft.ids import PeerId, RunId
from weft.launch.guard import DayCount, Guard
from weft.launch.session import Options
from weft.net.messages import Contact
from weft.net.ticket import issue
from weft.run.machine import CapsConfig, Moved, PeerConfig
from weft.stages.asking import MOST_DRAWING, SILENT_S, TRIED, Asking, asking, turns
from weft.store.home import Home, RecordFile

PEERS = [PeerId(f"{number:064x}") for number in range(100)]


def played(draws: Callable[[PeerId], bool], seconds: int) -> tuple[dict[PeerId, float], list[PeerId]]:
    """Return who is linked after so long, and who was let go of, of a hundred whom it knows."""
    kept_at: dict[PeerId, float] = {}
    tried_at: dict[PeerId, float] = {}
    gone: list[PeerId] = []
    for now in range(0, seconds, 2):
        heard = {peer for peer in kept_at if draws(peer)}
        dropped, kept = turns(PEERS, kept_at, tried_at, heard.__contains__, float(now))
        for peer in dropped:
            del kept_at[peer]
        gone += dropped
        kept_at |= dict.fromkeys(kept, float(now))
        tried_at |= dict.fromkeys(kept, float(now))
        assert sum(not draws(peer) for peer in kept_at) <= TRIED
    return kept_at, gone


def test_the_few_that_draw_are_found_among_many_and_stay_linked() -> None:
    few = {PEERS[0], PEERS[50], PEERS[99]}
    linked, gone = played(few.__contains__, 200)
    assert few <= set(linked)
    assert not few & set(gone)


def test_where_enough_draw_no_more_are_tried() -> None:
    linked, gone = played(lambda _peer: True, 60)
    assert MOST_DRAWING <= len(linked) < MOST_DRAWING + TRIED
    assert gone == []


def test_nobody_is_let_go_of_where_there_is_nobody_else() -> None:
    kept_at = dict.fromkeys(PEERS[:TRIED], 0.0)
    assert turns(PEERS[:TRIED], kept_at, kept_at, lambda _peer: False, 10 * SILENT_S) == ([], [])
    dropped, kept = turns(PEERS[: TRIED + 1], kept_at, kept_at, lambda _peer: False, 10 * SILENT_S)
    assert (len(dropped), kept) == (1, [PEERS[TRIED]])
    assert turns(PEERS, kept_at, kept_at, lambda _peer: False, SILENT_S / 2) == ([], [])


def test_the_cap_of_a_day_holds_over_all_starts_of_who_asks(tmp_path: Path) -> None:
    home, caps = Home(tmp_path), CapsConfig(day_nbytes=10**8)
    run, today = RunId("d" * 64), datetime.now().date()  # the machine's calendar
    ticket = issue(run, [Contact(peer=PEERS[0], name="", addresses=("tls://127.0.0.1:9",))], bytes(16))
    options = Options(home=home, key=None, settings=PeerConfig(caps=caps, transports=("tls",)))

    async def ask() -> None:
        async with asking(ticket, options):
            pass

    def asked(day: date, nbytes: int) -> str:
        kept: RecordFile[Moved | None] = RecordFile(home.moved_asking(run), Moved, 4096, None)
        kept.keep(Moved(day=day.isoformat(), nbytes=nbytes))
        with pytest.raises(WeftError) as found:
            asyncio.run(ask())
        return str(found.value)

    assert "0.1 GB were moved today" in asked(today, 10**8)
    assert "moved today" not in asked(today, 10**7)
    assert "moved today" not in asked(today - timedelta(days=1), 10**8)


def test_who_may_move_no_more_says_why_and_asks_no_longer(tmp_path: Path) -> None:
    caps = CapsConfig(day_nbytes=10**8)

    async def main() -> str:
        guarded, day = Asking(), DayCount(tmp_path / "moved", caps, VirtualClock(), UTC)
        guard = Guard(caps, day, lambda _event: None, guarded)
        guard.look()
        assert not guarded.ended.done()
        day.ration.spend(10**8)
        guard.look()
        guarded.stop("it has ended")
        return await guarded.ended

    assert asyncio.run(main()) == "0.1 GB moved today, and the cap is 0.1 GB"
