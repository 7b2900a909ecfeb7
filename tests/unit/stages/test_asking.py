"""To which members of a run without stages whoever asks is linked."""

from collections.abc import Callable

from weft.ids import PeerId
from weft.stages.asking import MOST_DRAWING, SILENT_S, TRIED, turns

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
