"""Words for every kind of event, and a method in one line."""

from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from unit.test_events import KINDS
from weft.dashboard.words import _ROWS, advice_of, described, in_words, notable
from weft.events import Entry, Event
from weft.ids import PeerId
from weft.sync.method.presets import (
    AsyncDiLoCoConfig,
    DdpConfig,
    DiLoCoConfig,
    MethodConfig,
    NoLoCoConfig,
    StreamingConfig,
    spell_out,
)


def value(hint: Any) -> Any:
    """Return something of a type that a field of an event has."""
    if hasattr(hint, "__supertype__"):
        return value(hint.__supertype__)
    if hint in (bool, int, float, str):
        return {bool: True, int: 3, float: 40.0, str: "a {word} of a stranger"}[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint(**{name: value(each) for name, each in get_type_hints(hint).items()})
    of = get_args(hint)
    if getattr(hint, "__origin__", None) is tuple:
        return (value(of[0]),) * 2
    return {value(of[0]): value(of[1])} if getattr(hint, "__origin__", None) is dict else value(of[0])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_event_has_a_row_whose_texts_can_be_written(kind: type[Event]) -> None:
    assert kind in _ROWS
    event = kind(**{name: value(hint) for name, hint in get_type_hints(kind).items() if name in kind.__struct_fields__})
    said = Entry(v=1, at=0.0, peer=PeerId("a" * 64), event=event)
    texts = [notable(said, str), described(event, str), *(advice_of(said, str) or ())]
    assert all(text is None or text for text in texts)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (DdpConfig(), ["every training step, gradient in bf16", "among all"]),
        (DiLoCoConfig(every=50, lr=0.7, momentum=0.9), ["every 50 training steps", "nesterov (lr 0.7, momentum 0.9"]),
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
