"""Features and losses of texts: each as if it were alone, however many are read together."""

import numpy as np
import pytest
import torch

from unit.compose.paths.tiny import MODEL, begun, texts
from weft.compose.paths import features as room
from weft.compose.paths.features import document_losses, features, token_losses
from weft.compose.space import numbers_digest
from weft.errors import ConfigError
from weft.model.flat import assemble


@pytest.fixture(params=[room.AT_ONCE, 16])
def _at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AT_ONCE", request.param)
    monkeypatch.setattr(room, "LOGITS_AT_ONCE", 7)


@pytest.mark.usefixtures("_at_once")
def test_features_are_the_mean_of_what_the_head_reads() -> None:
    model, all_words = assemble(MODEL, begun()), texts(7, 12)
    ragged = [words[: 1 + (5 * number) % 12] for number, words in enumerate(all_words)]
    found = features(model, ragged)
    for row, words in zip(found, ragged, strict=True):
        alone = model.features(torch.from_numpy(words)[None], None)[0].mean(0)
        np.testing.assert_allclose(row, alone.double().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_at_once")
def test_losses_are_those_of_each_token() -> None:
    model, windows = assemble(MODEL, begun()), texts(7, 12)
    found = token_losses(model, windows)
    assert found.shape == (7, 11)
    for row, words in zip(found, windows, strict=True):
        p = torch.log_softmax(model(torch.from_numpy(words[:-1])[None])[0], -1)
        alone = [-float(p[place, word]) for place, word in enumerate(words[1:])]
        np.testing.assert_allclose(row, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_at_once")
def test_losses_of_documents_are_those_of_each_alone() -> None:
    model, windows = assemble(MODEL, begun()), texts(7, 12)
    ragged = [words[: 2 + (5 * number) % 11] for number, words in enumerate(windows)]
    found = document_losses(model, ragged)
    for mine, words in zip(found, ragged, strict=True):
        np.testing.assert_allclose(mine, token_losses(model, words[None])[0], rtol=1e-4, atol=1e-4)
    assert document_losses(model, []) == []
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        document_losses(model, [windows[0], windows[0, :1]])


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="a text is empty"):
        features(assemble(MODEL, begun()), [np.array([1, 2]), np.array([], dtype=np.int64)])


def test_a_model_is_named_by_its_numbers() -> None:
    assert numbers_digest(begun()) == numbers_digest(begun().clone())
    assert numbers_digest(begun()) != numbers_digest(begun() * 2)
