"""Texts along paths: no token is predicted by what it decided, and what it costs is told."""

from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unit.compose.paths.tiny import LEVELS, MODEL, begun, texts
from weft.compose.paths.features import document_losses, features, token_losses
from weft.compose.paths.levels import Levels, LevelsConfig, Path
from weft.compose.paths.modules import Modules
from weft.compose.paths.reading import Cost, Reader, cost, deciding, pairs, pieces
from weft.compose.paths.routing import Router, made
from weft.compose.space import numbers_digest
from weft.errors import ConfigError
from weft.inference.sample import Sampling, generate
from weft.model.flat import assemble
from weft.model.transformer import Transformer
from weft.rng import stream

PREFIX, WORDS = 4, 21
WINDOWS = texts(6, WORDS)
WINDOWS[:3, 10:] = 28 - WINDOWS[:3, 10:]  # of the other kind, from there on


def modules() -> Modules:
    """Return modules that have come apart."""
    found = Modules.of(LEVELS, begun().clone())
    for number, vector in enumerate(found.vectors.values()):
        vector.mul_(4 + number)
    return found


def router(seed: int, kind: int = 0) -> Router:
    """Return a router whose paths are about equally likely."""
    z = features(dense(), list(WINDOWS[:, :PREFIX]))
    weights = np.random.default_rng(seed).normal(size=(4, MODEL.width))
    record = made("softmax", LEVELS.config, numbers_digest(begun()), weights, -weights @ z.mean(0) + kind).record
    return Router(msgspec.structs.replace(record, prefix=PREFIX))


@cache
def dense() -> Transformer:
    return assemble(MODEL, begun())


def reader(every: int | None, rerouter: Router | None = None) -> Reader:
    return Reader(LEVELS, modules().model, begun(), router(0), every, rerouter)


def chosen(mine: Reader, words: NDArray[np.int64], position: int) -> Path:
    """Return the path that predicts the word at `position`, word by word."""
    every = mine.every or WORDS
    if position < every:
        z, by = words[: min(PREFIX, position)], mine.router
    else:
        start = (position // every - 1) * every
        z, by = words[start : start + every], mine.rerouter or mine.router
    return LEVELS.paths[int(by.best(features(dense(), [z]))[0])]


@pytest.mark.parametrize("every", [None, 3, 4, 7, 20])
@pytest.mark.parametrize("has_rerouter", [False, True])
def test_each_token_is_predicted_along_its_own_path(every: int | None, has_rerouter: bool) -> None:
    mine = reader(every, router(1) if has_rerouter else None)
    found = mine.read(WINDOWS)
    losses = {path: token_losses(mine.model(path), WINDOWS) for path in LEVELS.paths}
    for row, words in enumerate(WINDOWS):
        each = [losses[chosen(mine, words, position)][row, position - 1] for position in range(PREFIX, WORDS)]
        assert found.losses[row] == pytest.approx(sum(each), rel=1e-6)
    assert found.num_scored == WORDS - PREFIX
    assert found.mean == pytest.approx(found.losses.sum() / (6 * (WORDS - PREFIX)))
    assert len(np.unique(found.paths)) > 1


def test_texts_that_turn_into_others_change_their_path_only_where_they_are_routed_again() -> None:
    assert reader(None).read(WINDOWS).paths.shape == (6, 1)
    paths = reader(5).read(WINDOWS).paths
    assert paths.shape == (6, 5)
    assert any(len(set(row)) > 1 for row in paths.tolist())


def test_paths_that_are_all_alike_read_as_the_dense_model_whatever_is_chosen() -> None:
    alike = Modules.of(LEVELS, begun())
    alone = token_losses(dense(), WINDOWS)[:, PREFIX - 1 :].sum(1)
    for every in (None, 5):
        found = Reader(LEVELS, alike.model, begun(), router(0), every).read(WINDOWS)
        np.testing.assert_allclose(found.losses, alone, rtol=1e-6)


@pytest.mark.parametrize("every", [None, 2, 3, 8, 64])
def test_nothing_decides_about_itself(every: int | None) -> None:
    for position in range(1, 40):
        decided = deciding(position, 32, every)
        assert 0 <= decided.start < decided.stop <= position
    text = pieces(40, 32, every)
    assert [place for piece in text for place in range(piece.start, piece.stop)] == list(range(40))
    for piece in text:
        places = range(max(piece.start, 32), piece.stop)
        assert all(deciding(place, 32, every) == piece.decided for place in places)


def test_what_is_read_again_is_told() -> None:
    text = pieces(41, 4, 10)  # to be read: 9, 19, 29, 39 and 40 tokens
    assert cost([2, 2, 2, 2, 2], text, is_kept=False) == Cost(40, 0)
    assert cost([0, 1, 0, 0, 0], text, is_kept=False) == Cost(9 + 19 + 29 + 10 + 1, 28)
    assert cost([0, 1, 0, 0, 0], text, is_kept=True) == Cost(9 + 19 + 20 + 10 + 1, 19)
    found = reader(5).read(WINDOWS)
    costs = [cost(paths, pieces(WORDS, PREFIX, 5), is_kept=False) for paths in found.paths.tolist()]
    assert found.dropping == Cost(sum(each.num_read for each in costs), sum(each.num_again for each in costs))
    assert found.dropping.num_read - found.dropping.num_again == 6 * (WORDS - 1)
    assert 0 < found.keeping.num_again <= found.dropping.num_again
    assert found.num_deciding == 6 * (4 + 5 + 5 + 5 + 5)
    assert reader(None).read(WINDOWS).dropping == Cost(6 * (WORDS - 1), 0)


# --- writing ---

PROMPT = WINDOWS[0, :6].tolist()


def written(mine: Reader, num: int = 25) -> list[tuple[int, Path]]:
    return list(mine.write(PROMPT, Sampling(max_new_tokens=num, temperature=0.0), stream(1, "test")))


@pytest.mark.parametrize("every", [None, 5, 7])
def test_each_token_is_drawn_along_its_own_path(every: int | None) -> None:
    mine, words = reader(every, router(1)), list(PROMPT)
    for token, path in written(mine):
        if every is not None and len(words) >= every:
            assert path == chosen(mine, np.array(words), len(words))
        logits = mine.model(path)(torch.tensor([words]))[0, -1]
        assert token == int(logits.argmax())
        words.append(token)
    assert len(words) == len(PROMPT) + 25


def test_a_path_that_stays_draws_as_one_model_does() -> None:
    mine = reader(None)
    found = written(mine)
    (path,) = {path for _, path in found}
    alone = generate(mine.model(path), PROMPT, Sampling(max_new_tokens=25, temperature=0.0), stream(1, "test"))
    assert [token for token, _ in found] == list(alone)


def test_a_text_ends_where_a_path_ends_it() -> None:
    every_token = [token for token, _ in written(reader(5))]
    stop = every_token[12]
    sampling = Sampling(max_new_tokens=25, temperature=0.0, stop_id=stop)
    found: Iterator[tuple[int, Path]] = reader(5).write(PROMPT, sampling, stream(1, "test"))
    assert [token for token, _ in found] == every_token[: every_token.index(stop)]


# --- what a router of later pieces learns from ---


def test_a_piece_is_paired_with_the_losses_of_the_next() -> None:
    mine = modules()
    each = [token_losses(mine.model(path), WINDOWS) for path in LEVELS.paths]
    z, losses = pairs(dense(), each, WINDOWS, 5)
    assert (len(z), losses.shape) == (3 * 6, (3 * 6, 4))  # 0-5, 5-10, 10-15, each with the next
    np.testing.assert_allclose(z[3 * 2 + 1], features(dense(), [WINDOWS[2, 5:10]])[0], rtol=1e-5)
    later = each[3][2, 9:14].mean()  # of words 10 to 14
    assert losses[3 * 2 + 1, 3] == pytest.approx(later)
    some = [np.array(text[:num]) for text, num in zip(WINDOWS, (9, 21, 10, 14, 15, 4), strict=True)]
    z, losses = pairs(dense(), [document_losses(mine.model(path), some) for path in LEVELS.paths], some, 5)
    assert (len(z), losses.shape) == (3 + 1 + 1 + 2, (7, 4))  # of those that have two pieces, and whole ones alone
    assert losses[1, 3] == pytest.approx(each[3][1, 9:14].mean())
    with pytest.raises(ConfigError, match="do not have two pieces of 11"):
        pairs(dense(), each, WINDOWS, 11)


# --- refused ---


def test_routers_of_other_paths_or_features_are_refused() -> None:
    other = Levels(LevelsConfig(levels=(2, 2), ends="path"), MODEL)
    with pytest.raises(ConfigError, match='ends "shared", the paths are of'):
        Reader(other, modules().model, begun(), router(0))
    with pytest.raises(ConfigError, match="Take the model that all paths began as"):
        Reader(LEVELS, modules().model, begun() * 2, router(0))
    with pytest.raises(ConfigError, match="every: a text is routed again after 1 tokens"):
        reader(1)
    with pytest.raises(ConfigError, match="nothing is left to score"):
        reader(None).read(WINDOWS[:, :PREFIX])
