"""The optimizer by numpy against the one that members train with, and what is no step of it."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unit.verify.evidence.forge import Done, done, head, numbers, rules, terms
from weft.store.chunks import state_index
from weft.sync.merge import outer
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig
from weft.verify.evidence.records import FalseStep
from weft.verify.evidence.shown import Unproven
from weft.verify.evidence.steps import check_step, prove_step, stepped
from weft.wire import digest_of, encode

OPTIMIZERS = [AdamWConfig(), AdamWConfig(weight_decay=0.0, eps=1e-3), InnerSgdConfig(), InnerSgdConfig(momentum=0.9)]


def proven(made_by: Done, before: int, **said: object) -> FalseStep:
    """Return what shows that a step is false; `said` of it otherwise than it was."""
    slope = made_by.slopes[before][0]
    return prove_step(
        made_by.work,
        made_by.made(before, **said),  # type: ignore[arg-type]
        made_by.ground(before // 3),
        (made_by.shown(before), made_by.shown(before + 1)),
        encode(state_index({"gradient": slope})),
        (numbers(made_by.states[before]), numbers(made_by.states[before + 1])),
        slope.numpy(),
    )


@given(
    seed=st.integers(0, 1 << 30),
    optimizer=st.sampled_from(OPTIMIZERS),
    number=st.integers(1, 3000),
    rate=st.floats(1e-8, 1.0),
    num_decayed=st.integers(0, 300),
)
def test_numbers_come_out_as_by_the_optimizer(
    seed: int, optimizer: AdamWConfig | InnerSgdConfig, number: int, rate: float, num_decayed: int
) -> None:
    luck = np.random.default_rng(seed)
    draw = lambda: (luck.standard_normal(300) * 10.0 ** luck.integers(-30, 3, 300)).astype(np.float32)  # noqa: E731
    known = {"local": draw(), "momentum": draw(), "moment1": draw(), "moment2": np.abs(draw())}
    made = outer.build(optimizer)
    names = ["local", *made.init(1)]
    vectors, slope = {name: known[name] for name in names}, draw()
    after = {name: torch.from_numpy(each.copy()) for name, each in vectors.items()}
    context = outer.StepContext(number=number, lr=rate, num_decayed=num_decayed)
    made.apply(after["local"], {name: after[name] for name in names[1:]}, torch.from_numpy(slope), context)
    here = range(100, 250)
    some = {name: each[100:250] for name, each in vectors.items()}
    found = stepped(terms(optimizer, num_decayed=num_decayed), rate, number, some, slope[100:250], here)
    assert found.keys() == after.keys()
    for name, each in after.items():
        assert found[name].tobytes() == each.numpy()[100:250].tobytes(), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("num", [5, 700, 300_000])
def test_no_honest_step_is_proven_false(optimizer: AdamWConfig | InnerSgdConfig, num: int) -> None:
    exact = rules(exact=terms(optimizer, num_decayed=num // 2))
    first = done(seed=num, num=num, rules=exact)
    second = done(seed=num + 1, num=num, segments=2, follows=first, rules=exact, me=4)
    for each in (first, second):
        for before in each.slopes:
            with pytest.raises(Unproven, match="the numbers are the optimizer's"):
                proven(each, before)


def changed(made_by: Done, before: int, name: str, at: int) -> Done:
    """Return it with the last bit of one number after a step turned, which is said to be so."""
    made_by.states[before + 1][name].view(torch.int32)[at] ^= 1
    return made_by.renamed()


@pytest.mark.parametrize(("name", "at"), [("local", 0), ("moment1", 301), ("moment2", 699), ("local", 256)])
def test_one_bit_of_a_state_is_enough(name: str, at: int) -> None:
    lied = changed(done(), 1, name, at)
    found = proven(lied, 1)
    assert found.block == at // 256
    assert check_step(lied.work, lied.made(1), found) == "its optimizer did not make this training step"
    assert len(encode(found)) < 20_000
    with pytest.raises(Unproven):
        proven(lied, 0)  # it ends before


def test_a_bit_far_behind_the_first_chunk_is_found() -> None:
    lied = changed(done(num=300_000), 0, "moment1", 299_999)
    assert proven(lied, 0).block == 299_999 // 256


def test_a_gradient_is_shortened_by_the_length_that_was_signed() -> None:
    honest = done()
    with pytest.raises(Unproven):
        proven(honest, 0)
    assert honest.slopes[0][1] > 1.0
    assert proven(honest, 0, length=2 * honest.slopes[0][1])
    assert honest.slopes[1][1] < 1.0
    with pytest.raises(Unproven):  # what is no longer than is allowed is as it was
        proven(honest, 1, length=0.5)


def test_another_rate_is_no_step_of_the_optimizer() -> None:
    """Its leases say how fast others are, and the work how many steps were made before."""
    honest = done()
    assert proven(honest.renamed(num_before=1), 0)
    other = replace(honest, heads=[head(3, honest.charter, me=4)])
    segment = msgspec.structs.replace(honest.work.segments[0], head=digest_of(other.heads[0]))
    assert proven(other.renamed(segments=(segment,)), 0)


def test_of_several_steps_at_once_nothing_is_shown() -> None:
    with pytest.raises(Unproven, match="no single training step"):
        proven(done(rules=rules(every=2)), 0)


def test_of_numbers_that_machines_round_otherwise_nothing_is_proven() -> None:
    lied = changed(done(), 0, "local", 3)
    assert lied.charter.audits
    audits = msgspec.structs.replace(lied.charter.audits, exact=msgspec.UNSET)
    with pytest.raises(Unproven, match="machines round otherwise"):
        proven(replace(lied, charter=msgspec.structs.replace(lied.charter, audits=audits)), 0)


def test_a_state_of_another_optimizer_is_none() -> None:
    honest = done()
    del honest.states[1]["moment2"]
    lied = honest.renamed()
    shown = replace_state(proven(changed(done(), 0, "local", 3), 0), lied)
    with pytest.raises(Unproven, match="none of this optimizer"):
        check_step(lied.work, lied.made(0), shown)


def replace_state(shown: FalseStep, by: Done) -> FalseStep:
    """Return what is shown with the states and the round of other work."""
    return msgspec.structs.replace(shown, ground=by.ground(), before=by.shown(0), after=by.shown(1))
