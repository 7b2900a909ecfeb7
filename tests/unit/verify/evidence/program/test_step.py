"""The operations of a step against the gradient that members train with, and each number of them alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from unit.training.numerics.test_decoder import BASE, FORMS
from unit.verify.evidence.program.made import SMALL, Made, made, model_of, trained, words
from weft.model.flat import layout
from weft.verify.evidence.program import evaluate as evaluating
from weft.verify.evidence.program.evaluate import held_nbytes, listed, named, taken
from weft.verify.evidence.program.step import program, shapes
from weft.wire import digest_of


@pytest.mark.parametrize("form", FORMS)
def test_tensors_lie_where_they_do_in_the_flat_vector(form: str) -> None:
    config, start = replace(BASE, **FORMS[form]), 0
    for span, shape in zip(layout(config), shapes(config).values(), strict=True):
        assert (span.shape, span.offset) == (shape, start)
        start += span.num


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_is_that_of_training_to_the_bit(form: str) -> None:
    config = replace(BASE, **FORMS[form])
    samples, model = words(config, 3, 70), model_of(config)
    expected, length = trained(model, samples, 2)
    found = Made(program(config, 3, 70, 2), model.vector.detach().numpy(), samples)
    for span in layout(config):
        here = slice(span.offset, span.stop)
        assert found.gradient[here].tobytes() == expected[here].tobytes(), span.name
    assert found.length == length


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    samples=st.integers(1, 4),
    tokens=st.integers(1, 12),
    micro_batch=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    head_width=st.sampled_from([2, 4, 10]),
    ffn_width=st.integers(1, 30),
    spread=st.sampled_from([0.0, 0.05, 1.0, 30.0]),
    form=st.sampled_from(["plain", "queries and keys normed", "biases", "head apart", "window"]),
)
def test_gradients_of_other_shapes_are_those_of_training(
    seed: int,
    samples: int,
    tokens: int,
    micro_batch: int,
    heads: tuple[int, int],
    head_width: int,
    ffn_width: int,
    spread: float,
    form: str,
) -> None:
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_width": head_width, "ffn_width": ffn_width}
    changes = FORMS[form] | ({} if form == "head apart" else {"num_kv_heads": heads[1]})
    config = replace(SMALL, **(changes | shape))
    given_words, model = words(config, samples, tokens, seed), model_of(config, seed, spread)
    expected, length = trained(model, given_words, micro_batch)
    found = Made(program(config, samples, tokens, micro_batch), model.vector.detach().numpy(), given_words)
    assert found.gradient.tobytes() == expected.tobytes()
    assert found.length == length


# --- each number alone ---

ODD = [{}, FORMS["queries and keys normed"], FORMS["biases"], FORMS["head apart"], FORMS["window"], FORMS["yarn"]]


@pytest.mark.parametrize("form", range(len(ODD)))
def test_each_number_is_made_of_what_it_reads_alone(form: int) -> None:
    whole, luck = made(**ODD[form]), np.random.default_rng(form)
    for number, operation in enumerate(whole.program.operations):
        output = whole.outputs[number]
        assert len(output) == operation.kind.num
        assert output.dtype == operation.kind.dtype
        for at in {0, len(output) - 1, *luck.integers(0, len(output), 3).tolist()}:
            found = whole.one(number, at)
            assert found.tobytes() == output[at : at + 1].tobytes(), (operation.name, at)
            assert found.dtype == output.dtype


def test_lengths_of_long_gradients_are_made_step_by_step() -> None:
    whole = made(1, 3, 1, vocab_size=7000, width=32)
    last = len(whole.program.operations) - 1
    assert len(whole.gradient) > 3 << 16
    for number in range(whole.program.gradient + 1, last + 1):
        for at in {0, len(whole.outputs[number]) - 1}:
            assert whole.one(number, at).tobytes() == whole.outputs[number][at : at + 1].tobytes()


def test_what_is_wide_is_made_again_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(num_layers=3)
    held = named(whole.program, whole.parameters, whole.words)
    monkeypatch.setattr(evaluating, "_SOON", 10_000)
    assert named(whole.program, whole.parameters, whole.words) == held
    assert held == [digest_of(listed(whole.program, *each)) for each in whole.outputs.items()]


@pytest.mark.parametrize("soon", [evaluating._SOON, 10_000])
def test_what_is_held_at_a_time_is_known_before(monkeypatch: pytest.MonkeyPatch, soon: int) -> None:
    monkeypatch.setattr(evaluating, "_SOON", soon)
    whole = made(num_layers=3)
    step = evaluating._Step(whole.program, whole.parameters, whole.words)
    for number in range(len(whole.program.operations)):
        step.next(number)
        assert step._nbytes == sum(each.nbytes for each in step._held.values())
    assert held_nbytes(whole.program) == step.most_nbytes > 4 * len(whole.gradient)


def test_some_outputs_are_taken() -> None:
    whole = made()
    wanted = [whole.numbered("0.weights"), whole.numbered("1.q.slope"), whole.program.gradient]
    found = taken(whole.program, whole.parameters, whole.words, wanted)
    assert sorted(found) == sorted(wanted)
    assert all(found[each].tobytes() == whole.outputs[each].tobytes() for each in wanted)


def test_a_changed_parameter_or_word_changes_what_is_named() -> None:
    whole = made()
    before = named(whole.program, whole.parameters, whole.words)
    other = whole.parameters.copy()
    other.view(np.int32)[100] ^= 1
    assert named(whole.program, other, whole.words) != before
    swapped = whole.words.reshape(3, -1)[[1, 0, 2]].copy()
    found = named(whole.program, whole.parameters, swapped)
    assert found[0] != before[0]
