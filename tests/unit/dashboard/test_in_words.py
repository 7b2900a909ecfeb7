"""A method in one line."""

import pytest

from weft.dashboard.words import in_words
from weft.sync.method.presets import (
    AsyncDiLoCoConfig,
    DdpConfig,
    DiLoCoConfig,
    MethodConfig,
    NoLoCoConfig,
    StreamingConfig,
    spell_out,
)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (DdpConfig(), ["every inner step, gradient in bf16", "among all"]),
        (DiLoCoConfig(every=50, lr=0.7, momentum=0.9), ["every 50 inner steps", "nesterov (lr 0.7, momentum 0.9"]),
        (StreamingConfig(fragments=4, overlap=3), ["in 4 fragments", "overlapping 3 steps"]),
        (AsyncDiLoCoConfig(), ["waiting for whoever is ready"]),
        (NoLoCoConfig(), ["graph pairs"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_it_names_the_choices(method: MethodConfig, words: list[str]) -> None:
    said = in_words(spell_out(method, 4))
    assert "\n" not in said
    for each in words:
        assert each in said
