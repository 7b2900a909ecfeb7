from itertools import islice

import msgspec
import numpy as np
import pytest
import torch

from weft.errors import ConfigError, NotFinite
from weft.inference.sample import Sampling, choose, generate
from weft.model.config import ModelConfig
from weft.model.flat import assemble
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.rng import stream

GREEDY = Sampling(temperature=0.0, max_new_tokens=20)


@pytest.fixture
def model() -> Transformer:
    torch.set_num_threads(1)
    config = ModelConfig(
        vocab_size=13, num_layers=2, num_heads=4, num_kv_heads=2, width=16, ffn_width=24, max_seq_len=24, is_tied=True
    )
    return assemble(config, initial_vector(config, 4) * 12)


def uncached(model: Transformer, window: list[int]) -> int:
    return int(model(torch.tensor([window]))[0, -1].argmax())


def text(model: Transformer, prompt: list[int], sampling: Sampling, seed: int = 0) -> list[int]:
    return list(generate(model, prompt, sampling, stream(seed, "text")))


def test_greedy_text_equals_that_without_a_cache(model: Transformer) -> None:
    found = text(model, [1, 2, 3], GREEDY)
    expected = [1, 2, 3]
    for _ in range(20):
        expected.append(uncached(model, expected))
    assert found == expected[3:]
    assert len(set(found)) > 2


def test_equal_seeds_give_equal_text_and_other_seeds_other_text(model: Transformer) -> None:
    sampling = Sampling(temperature=5.0, max_new_tokens=20)
    assert text(model, [1], sampling, seed=5) == text(model, [1], sampling, seed=5)
    assert len({tuple(text(model, [1], sampling, seed=seed)) for seed in range(5)}) == 5


def test_greedy_draws_no_random_number(model: Transformer) -> None:
    generator = stream(0, "untouched")
    list(generate(model, [1], GREEDY, generator))
    assert generator.random() == stream(0, "untouched").random()


def test_the_stop_token_ends_the_text_and_is_not_in_it(model: Transformer) -> None:
    whole = text(model, [1, 2, 3], GREEDY)
    stop = whole[4]
    found = text(model, [1, 2, 3], msgspec.structs.replace(GREEDY, stop_id=stop))
    assert found == whole[: whole.index(stop)]


def test_a_text_longer_than_the_context_goes_on_from_its_newest_half(model: Transformer) -> None:
    found = text(model, [1, 2, 3], msgspec.structs.replace(GREEDY, max_new_tokens=60))
    whole, window = [1, 2, 3], [1, 2, 3]
    for _ in range(60):
        if len(window) > 24:
            window = whole[-12:]
        whole.append(uncached(model, window))
        window.append(whole[-1])
    assert found == whole[3:]


def test_of_a_prompt_longer_than_the_context_the_newest_part_is_read(model: Transformer) -> None:
    prompt = [i // 4 for i in range(50)]
    newest, oldest = uncached(model, prompt[-24:]), uncached(model, prompt[:24])
    assert newest != oldest
    assert next(generate(model, prompt, GREEDY, stream(0, "text"))) == newest


def test_no_tokens_are_made_when_none_are_asked_for(model: Transformer) -> None:
    assert text(model, [1], msgspec.structs.replace(GREEDY, max_new_tokens=0)) == []


def test_the_caller_can_train_between_two_tokens(model: Transformer) -> None:
    tokens = generate(model, [1], GREEDY, stream(0, "text"))
    next(tokens)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert len(list(islice(tokens, 3))) == 3


@pytest.mark.parametrize(("prompt", "words"), [([], "is empty"), ([13], "token 13 is outside"), ([-1], "token -1 is")])
def test_a_prompt_the_model_cannot_read_is_refused_at_once(model: Transformer, prompt: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(model, prompt, GREEDY, stream(0, "text"))


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3]))


def shares(sampling: Sampling, draws: int = 4000) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    generator = stream(1, "shares")
    counts = np.bincount([choose(LOGITS, sampling, generator) for _ in range(draws)], minlength=4)
    return counts / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=0.5), [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        (Sampling(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1.0, top_k=1), [0, 1, 0, 0]),
        (Sampling(temperature=1.0, top_k=99), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=1.0, top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=1.0, top_p=0.39), [0, 1, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.89), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=0.0), [0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_in_the_promised_shares(sampling: Sampling, expected: list[float]) -> None:
    found = shares(sampling)
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert all(found[i] == 0 for i, share in enumerate(expected) if share == 0)


def test_of_equally_likely_tokens_the_lowest_wins() -> None:
    logits = np.array([0.0, *[2.0, 1.0] * 500])  # long enough that an unstable sort would show
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=1), Sampling(top_p=1e-9)):
        assert choose(logits, sampling, stream(0, "tie")) == 1


def test_tiny_temperatures_do_not_overflow() -> None:
    assert choose(np.array([1e4, 1.0, -1e4]), Sampling(temperature=1e-6), stream(0, "cold")) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    with pytest.raises(NotFinite, match="NaN or infinite"):
        choose(np.array([0.0, bad]), GREEDY, stream(0, "bad"))
