"""Which rung is chosen from what rounds took, and who may change it when."""

import msgspec
import pytest

from charters import charter
from weft.codec.config import Bf16Config, E3m0Config, Int8Config
from weft.ids import Round
from weft.sync.method.choices import Choices, NesterovConfig
from weft.sync.method.presets import LADDER, START, AutoConfig, spell_out
from weft.sync.records.charter import Charter
from weft.sync.records.tuning import PACE, SOON, Seen, Tuned, chosen, is_allowed, rung_of, tuned_charter

NOW = Round(100)


def on(rung: int, tune: float = 0.05, tuned_at: int = 0) -> Charter:
    every, codec = LADDER[rung]
    method = msgspec.structs.replace(spell_out(AutoConfig(tune=tune), 4), every=every, codec=codec)
    before = charter()
    settings = msgspec.structs.replace(before.settings, method=method)
    return msgspec.structs.replace(before, settings=settings, tuned_at=tuned_at)


def rung(state: Charter, seen: Seen | None, round: Round = NOW) -> int | None:
    tuned = chosen(state, round, seen)
    return None if tuned is None else tuned.rung


def test_the_ladder_goes_down_to_fewer_bytes_a_step() -> None:
    bits = {Bf16Config: 16.0, Int8Config: 8.125, E3m0Config: 4.0}
    costs = [bits[type(codec)] / every for every, codec in LADDER]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == len(costs)


@pytest.mark.parametrize(
    ("here", "waited_s", "worked_s", "there"),
    [
        (START, 1.0, 30.0, None),  # 3.2 %
        (START, 1.6, 30.0, 5),  # 5.06 %
        (START, 3.0, 30.0, 6),  # of 50 steps 3 of 53 are too much, of 100 they are not
        (START, 30.0, 30.0, 8),  # 500 steps: 30 of 530
        (START, 300.0, 30.0, 8),  # nothing suffices: the last
        (START, 0.5, 30.0, 3),  # 20 steps: 0.5 of 20.5 is less than 3 %
        (START, 0.25, 30.0, 2),
        (START, 0.001, 30.0, 0),
        (0, 2.0, 10.0, 2),  # a quarter of the bytes: 0.5 of 10.5
        (8, 1.0, 500.0, 5),  # 50 steps: 1 of 51; of 30 it is more than 3 %
    ],
)
def test_members_wait_for_the_share_that_is_allowed(
    here: int, waited_s: float, worked_s: float, there: int | None
) -> None:
    assert rung(on(here), Seen(waited_s, worked_s)) == there


def test_to_go_up_it_must_be_clearly_less() -> None:
    assert rung(on(4), Seen(0.8, 30.0)) is None  # twenty steps: 0.8 of 20.8 is 3.8 %, allowed, and not surely
    assert rung(on(2), Seen(0.8, 20.0)) is None  # 3.8 % where it stands


def test_nothing_is_changed_without_measurements_too_soon_or_where_it_is_not_asked_for() -> None:
    slow, slower = Seen(3.0, 30.0), Seen(30.0, 30.0)  # up to twice what is allowed, and beyond
    assert rung(on(START), None) is None
    assert rung(on(START, tuned_at=NOW - PACE + 1), slow) is None
    assert rung(on(START, tuned_at=NOW - PACE), slow) == 6
    assert rung(on(START, tuned_at=NOW - SOON + 1), slower) is None
    assert rung(on(START, tuned_at=NOW - SOON), slower) == 8
    assert rung(on(START, tune=0.0), slower) is None


def test_a_leader_names_nothing_that_voters_refuse() -> None:
    off = on(START, tuned_at=NOW - SOON)
    method = msgspec.structs.replace(off.settings.method, every=7)
    off = msgspec.structs.replace(off, settings=msgspec.structs.replace(off.settings, method=method))
    assert rung(off, Seen(30.0, 30.0)) is None  # from off the ladder all is up
    assert rung(msgspec.structs.replace(off, tuned_at=NOW - PACE), Seen(30.0, 30.0)) is not None


def test_who_votes_knows_what_may_be_named() -> None:
    tuned = Tuned(rung=6, waited_ms=3000, worked_ms=30_000)
    assert tuned.share == pytest.approx(1 / 11)
    assert is_allowed(on(START), NOW, tuned)
    assert not is_allowed(on(6), NOW, tuned)
    assert is_allowed(on(START, tuned_at=NOW - SOON), NOW, tuned)
    assert not is_allowed(on(START, tuned_at=NOW - SOON + 1), NOW, tuned)
    assert not is_allowed(on(8, tuned_at=NOW - SOON), NOW, tuned)  # up
    assert not is_allowed(on(START, tune=0.0), NOW, tuned)
    after = tuned_charter(on(START), NOW, tuned)
    assert (after.settings.method.every, after.settings.method.codec) == LADDER[6]
    assert after.tuned_at == NOW
    assert after.settings.method.apply == on(START).settings.method.apply
    assert rung_of(after.settings.method) == 6


def test_what_a_steward_has_set_otherwise_finds_its_way_back() -> None:
    state = on(START)
    method = msgspec.structs.replace(state.settings.method, every=70, codec=Int8Config())
    state = msgspec.structs.replace(state, settings=msgspec.structs.replace(state.settings, method=method))
    assert rung(state, Seen(0.7, 70.0)) == 3  # half the bytes: 0.35 of 10.35 is more than 3 %, of 20.35 it is not
    assert rung(state, Seen(70.0, 70.0)) == 8


def test_only_a_plain_method_is_tuned() -> None:
    set_otherwise: tuple[dict[str, object], ...] = (
        {"overlap": 1},
        {"feedback": 0.9},
        {"basis": "tiles"},
        {"wait": "ready"},
        {"mix": 0.5},
        {"merge": "senders_mean"},
        {"reply_codec": Int8Config()},
    )
    for fields in set_otherwise:
        with pytest.raises(ValueError, match="method: tune: "):
            Choices(every=30, send="delta", apply=NesterovConfig(), tune=0.05, **fields)  # type: ignore[arg-type]
