"""Works that contradict themselves or the rounds that they name, and honest ones, which never do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from unit.verify.evidence.forge import CODECS, OTHER, Done, done, head, numbers, rules
from weft.codec.config import CodecConfig, Int8Config
from weft.ids import Tokens
from weft.sync.merge.reduce import codec_in, encode_parts
from weft.sync.records.parts import cut
from weft.sync.records.work import Segment
from weft.verify.evidence.shown import Unproven
from weft.verify.evidence.works import check_payload, prove_claim, prove_move, prove_payload, prove_start
from weft.wire import digest, digest_of

HONEST = [
    done(),
    done(seed=1, num=5000, segments=3),
    done(seed=2, segments=2, follows=done(seed=1)),
    done(seed=3, rules=rules(every=2), segments=2),
]


def claimed(made_by: Done) -> Any:
    return prove_claim(made_by.work, [(each, made_by.charter) for each in made_by.heads])


def started(made_by: Done, before: Done | None = None) -> Any:
    last = None if before is None else before.shown(len(before.names) - 1)
    return prove_start(made_by.work, None if before is None else before.signed, made_by.shown(0), last)


def with_segment(made_by: Done, number: int = 0, **fields: Any) -> Done:
    segments = list(made_by.work.segments)
    segments[number] = msgspec.structs.replace(segments[number], **fields)
    return made_by.renamed(segments=tuple(segments))


# --- claims ---


@pytest.mark.parametrize("honest", HONEST)
def test_no_honest_claim_is_proven_false(honest: Done) -> None:
    with pytest.raises(Unproven, match="it claims what its training steps take"):
        claimed(honest)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda honest: honest.renamed(tokens=Tokens(33)), "other tokens"),
        (lambda honest: with_segment(honest, num_steps=5, round=3), "more training steps than there were samples"),
        (lambda honest: with_segment(honest, holder=OTHER.peer), "leased to another"),
        (lambda honest: with_segment(honest, round=4), "do not follow each other"),
    ],
)
def test_what_the_rounds_do_not_bear_out_is_a_lie(change: Callable[[Done], Done], what: str) -> None:
    lied = change(done())
    found = claimed(lied)
    assert found.grounds[0].manifest == lied.heads[0]
    with pytest.raises(Unproven):
        prove_claim(lied.work, [(lied.heads[0], rules(every=2))])  # another charter than was named


def test_segments_follow_each_other() -> None:
    honest = done(segments=2)
    apart = replace(honest, heads=[honest.heads[0], head(4, honest.charter)])
    lied = with_segment(apart, 1, head=digest_of(apart.heads[1]))
    assert claimed(lied)
    with pytest.raises(Unproven, match="all segments"):
        prove_claim(lied.work, [(lied.heads[0], lied.charter)])


def test_who_is_away_may_have_its_lease_made_by_another() -> None:
    honest = done()
    heads = [msgspec.structs.replace(honest.heads[0], leases=honest.heads[0].leases[1:])]
    assert {lease.peer for lease in heads[0].leases} == {OTHER.peer}
    segment = Segment(head=digest_of(heads[0]), round=heads[0].round, holder=OTHER.peer, num_steps=2)
    with pytest.raises(Unproven):
        claimed(replace(honest, heads=heads).renamed(segments=(segment,)))


# --- optimizers ---


def test_no_honest_start_is_proven_false() -> None:
    before = done(seed=1)
    after = done(seed=2, follows=before)
    for made_by, followed in ((before, None), (after, before)):
        with pytest.raises(Unproven, match="its optimizer"):
            started(made_by, followed)


@pytest.mark.parametrize("name", ["moment1", "moment2"])
@pytest.mark.parametrize("num", [700, 300_000])
def test_a_new_optimizer_is_zeros(name: str, num: int) -> None:
    lied = done(num=num)
    lied.states[0][name][num - 1] = 1e-8
    assert started(lied.renamed())


@pytest.mark.parametrize("fields", [{"num_before": 3}, {"error": digest(b"some error")}])
def test_what_is_said_to_be_new_has_nothing_before(fields: dict[str, Any]) -> None:
    lied = done().renamed(**fields)
    assert prove_start(lied.work, None)
    with pytest.raises(Unproven, match="more is shown"):
        started(lied)


def test_an_optimizer_goes_on_from_the_work_that_is_named() -> None:
    before = done(seed=1)
    honest = done(seed=2, follows=before)
    honest.states[0]["moment1"][3] += 1
    assert started(honest.renamed(), before)
    elsewhere = done(seed=5)
    with pytest.raises(Unproven, match="not the one that is shown"):
        started(honest.renamed(), elsewhere)
    with pytest.raises(Unproven, match="not the one that is shown"):
        prove_start(honest.work, None)
    for fields in ({"num_before": 1}, {"error": digest(b"x")}):
        lied = done(seed=2, follows=before).renamed(**fields)
        assert prove_start(lied.work, before.signed)


def test_what_is_shown_in_place_of_a_named_state_is_none() -> None:
    before = done(seed=1)
    lied = done(seed=2, follows=before)
    lied.states[0]["moment1"][3] += 1
    lied = lied.renamed()
    last = before.shown(2, {**before.states[2], "moment1": torch.ones(700)})
    with pytest.raises(Unproven, match="has not named there"):
        prove_start(lied.work, before.signed, lied.shown(0), last)
    with pytest.raises(Unproven, match="has not named there"):
        prove_start(lied.work, before.signed, lied.shown(1), before.shown(2))
    with pytest.raises(Unproven, match="has not named there"):
        prove_start(lied.work, before.signed, lied.shown(0), before.shown(1))


def moved(made_by: Done, segment: int, every: int) -> Any:
    at = segment * (1 + 2 // every)
    return prove_move(made_by.work, made_by.ground(), segment, made_by.shown(at - 1), made_by.shown(at))


@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_stays_as_it_is_where_parameters_are_moved(every: int) -> None:
    honest = done(segments=3, rules=rules(every=every))
    for segment in (1, 2):
        with pytest.raises(Unproven, match="stayed as it was"):
            moved(honest, segment, every)
    honest.states[1 + 2 // every]["moment2"][699] += 1e-3
    assert moved(honest.renamed(), 1, every)
    with pytest.raises(Unproven, match="has not named there"):  # a training step moves it
        prove_move(honest.renamed().work, honest.ground(), 2, honest.renamed().shown(0), honest.renamed().shown(1))


# --- payloads ---


def paid(made_by: Done, right: Any) -> Any:
    last = len(made_by.states) - 1
    parameters = tuple(numbers(made_by.states[each])["local"] for each in (0, last))
    states = (made_by.shown(0), made_by.shown(last))
    return prove_payload(made_by.work, made_by.ground(), states, parameters, made_by.payload, right)  # type: ignore[arg-type]


def encoded(made_by: Done, delta: torch.Tensor) -> tuple[Any, ...]:
    codec = codec_in(made_by.charter.settings.method, 4)
    return tuple(map(bytes, encode_parts(codec, delta, cut(len(delta), made_by.heads[-1].uplinks))))


@pytest.mark.parametrize("codec", CODECS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("num", [700, 20_000])
def test_no_honest_payload_is_proven_false(codec: CodecConfig, num: int) -> None:
    honest = done(num=num, rules=rules(codec))
    delta = honest.states[0]["local"] - honest.states[-1]["local"]
    assert encoded(honest, delta) == tuple(map(bytes, honest.payload))
    with pytest.raises(Unproven, match="is what its states came to"):
        paid(honest, honest.payload)
    with pytest.raises(Unproven, match="is what its states came to"):
        paid(honest, encoded(honest, delta * 2))  # who is wrong itself shows nothing


@pytest.mark.parametrize("codec", CODECS, ids=lambda each: type(each).__name__)
def test_a_payload_that_is_longer_than_its_steps_is_a_lie(codec: CodecConfig) -> None:
    honest = done(num=20_000, rules=rules(codec))
    delta = honest.states[0]["local"] - honest.states[-1]["local"]
    for factor in (torch.tensor(2.0), torch.where(torch.arange(20_000) > 19_000, 1.5, 1.0)):
        lied = replace(honest, payload=encoded(honest, delta * factor)).renamed()
        found = paid(lied, encoded(honest, delta))
        assert check_payload(lied.work, found) == "its payload is not what its training steps came to"


def test_of_what_follows_from_more_than_two_states_no_payload_is_shown() -> None:
    for made_by in (done(segments=2), done(rules=rules(Int8Config(block=64), fragments=2))):
        with pytest.raises(Unproven, match="follows from more"):
            paid(made_by, made_by.payload)
