"""Every order in which one member of a stage hears of passages and accusations, and its parameters change.

It knows an honest member, a liar, one that accuses who lies, and one that accuses who does not. Whatever comes first,
twice or too late: it accuses the liar alone, looks at nothing that its parameters are not of, looks at nothing twice
that it could look at, and ends by believing the false accuser no more, and the true one always.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from model.search import num_reached
from weft.ids import PeerId
from weft.verify import passages
from weft.verify.passages import (
    MOST_FALSE,
    Accuse,
    Accused,
    Clear,
    Closed,
    Event,
    Key,
    Look,
    Looked,
    Opened,
    Told,
    Watch,
    step,
)
from weft.wire import digest

ME, HONEST, LIAR, TRUE, FALSE = (PeerId(digit * 64) for digit in "01234")
HEADS = digest(b"first"), digest(b"second")
RIGHT, WRONG, LATER = Key(HONEST, digest(b"right")), Key(LIAR, digest(b"wrong")), Key(LIAR, digest(b"later"))
OF = {RIGHT: HEADS[0], WRONG: HEADS[0], LATER: HEADS[1]}
MAX_EVENTS = 7


class World(NamedTuple):
    watch: tuple[Any, ...] = (None, (), (), (), (), ())
    num_events: int = 0
    state: int = -1  # of `HEADS`; -1: none yet
    is_open: bool = False
    looking: frozenset[Key] = frozenset()
    done: frozenset[Key] = frozenset()  # of this state
    accused: frozenset[Key] = frozenset()


def frozen(watch: Watch) -> tuple[Any, ...]:
    parts = (watch.begun, watch.doubted, watch.num_false, watch.results)
    return (watch.opened, *(tuple(each.items()) for each in parts), watch.early)


def thawed(world: World) -> Watch:
    opened, *parts, early = world.watch
    begun, doubted, num_false, results = (dict(each) for each in parts)
    return Watch(ME, 2.0, opened, begun, early, doubted, num_false, results)


def following(world: World) -> Iterator[World]:
    if world.num_events == MAX_EVENTS:
        return
    events: list[Event] = [Told(TRUE, key, head) for key, head in OF.items()]
    events += [Accused(TRUE, WRONG, HEADS[0], 1), Accused(FALSE, RIGHT, HEADS[0], 1), Accused(ME, WRONG, HEADS[0], 1)]
    for key in world.looking:
        outcome = "equal" if key.author == HONEST else "differs"
        events += [Looked(key, outcome), Looked(key, None)]  # type: ignore[arg-type]
    if world.is_open:
        events.append(Closed())
    if world.state < 1 and not world.is_open:
        events.append(Opened(HEADS[world.state + 1], b"a signature", 3, world.state + 1))
    for event in events:
        yield after(world, event)


def after(world: World, event: Event) -> World:
    world = world._replace(num_events=world.num_events + 1)
    match event:
        case Opened():
            world = world._replace(state=world.state + 1, is_open=True, done=frozenset())
        case Closed():  # who looks is stopped first
            world = world._replace(is_open=False, looking=frozenset())
        case Looked(key=key, outcome=outcome):
            world = world._replace(looking=world.looking - {key})
            world = world if outcome is None else world._replace(done=world.done | {key})
    watch, outputs = step(thawed(world), event)
    for output in outputs:
        match output:
            case Look(key=key):
                assert world.is_open, "it looks while its parameters change"
                assert OF[key] == HEADS[world.state], "it looks at what other parameters have made"
                assert key not in world.looking | world.done, "it looks twice"
                world = world._replace(looking=world.looking | {key})
            case Accuse(key=key):
                world = world._replace(accused=world.accused | {key})
            case Clear(by=by):
                assert by == FALSE, "it believes less who was right"
    return world._replace(watch=frozen(watch))


def check(world: World) -> None:
    assert all(key.author == LIAR for key in world.accused), "an honest member is accused"
    assert all(by == FALSE and num <= 1 for by, num in dict(world.watch[3]).items()), "one lie counts twice"


def test_only_the_liar_is_accused_whatever_comes_first() -> None:
    assert num_reached(World(), check, following) > 3_000


@pytest.mark.parametrize("name", ["_concluded", "_opened", "_begun"])
def test_the_search_finds_a_broken_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def concluded(watch: Watch, looked: Looked, accusers: list[PeerId]) -> Any:
        return watch, tuple(Clear(by, looked.key) for by in (*accusers, TRUE) if looked.outcome == "equal")

    def opened(watch: Watch, event: Opened) -> Any:
        watch, outputs = rules["_opened"](watch, event)
        return watch, (*outputs, *(Look(each.key) for each in watch.early))

    def begun(watch: Watch, _key: Key, _accusers: frozenset[PeerId]) -> Watch:
        return watch

    rules = {each: getattr(passages, each) for each in ("_concluded", "_opened", "_begun")}
    monkeypatch.setattr(passages, name, {"_concluded": concluded, "_opened": opened, "_begun": begun}[name])
    with pytest.raises(AssertionError):
        num_reached(World(), check, following)


def test_who_was_wrong_too_often_is_heard_no_more() -> None:
    watch = step(Watch(ME, 0.0), Opened(HEADS[0], b"a signature", 3, 0))[0]
    for number in range(MOST_FALSE + 2):
        key = Key(HONEST, digest(f"{number}".encode()))
        watch, outputs = step(watch, Accused(FALSE, key, HEADS[0], 1))
        assert bool(outputs) == (number < MOST_FALSE)
        watch, _ = step(watch, Looked(key, "equal"))
