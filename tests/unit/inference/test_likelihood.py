"""How likely texts are, many at once, is what the model says of each alone."""

import numpy as np
import pytest
import torch

from weft.inference import likelihood
from weft.inference.likelihood import Scored, log_likelihoods
from weft.model.config import ModelConfig
from weft.model.flat import assemble
from weft.model.initial import initial_vector

CONFIG = ModelConfig(vocab_size=50, num_layers=2, num_heads=2, num_kv_heads=1, width=32, ffn_width=48, max_seq_len=64)


def texts() -> list[Scored]:
    luck = np.random.default_rng(0)
    found = []
    for length in (3, 40, 1, 17, 40, 2):
        is_asked = luck.random(length) < 0.5
        is_asked[0] = True  # it counts for nothing: nothing predicts a first token
        found.append(Scored(luck.integers(0, 50, length).astype(np.uint32), is_asked))
    return found


@pytest.mark.parametrize(("at_once", "logits"), [(4096, 1024), (50, 3), (1, 1)])
def test_each_text_has_the_likelihood_that_it_has_alone(
    at_once: int, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "TOKENS_AT_ONCE", at_once)
    monkeypatch.setattr(likelihood, "LOGITS_AT_ONCE", logits)
    model = assemble(CONFIG, 20 * initial_vector(CONFIG, 3))
    found = dict(log_likelihoods(model, texts()))
    for number, text in enumerate(texts()):
        ids = torch.from_numpy(text.ids.astype(np.int64))
        scores = torch.log_softmax(model(ids[None])[0].double(), -1)
        expected = sum(float(scores[at - 1, ids[at]]) for at in range(1, len(ids)) if text.is_asked[at])
        assert found[number] == pytest.approx(expected, rel=1e-4)
    assert found[2] == 0.0
    assert min(found.values()) < -10
