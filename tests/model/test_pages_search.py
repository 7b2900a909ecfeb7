"""Every interleaving of three texts that share one machine's pages: whatever happens, pages add up.

A world is a scheduler with its pool, as they are in production, and what became of each text. Texts begin, are read
piece by piece, grow until they end, share what they begin with, are cancelled, rest while nobody reads them and go on,
fail in the middle of a step, and give their pages up for others where there are too few. Pages have two tokens, so that
each text grows over several.

In every world each page is free, kept, or held, by as many as its count says; and who hold one page have the same text
up to its end, and have read it. What is planned writes to no page that another may read.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import pytest

from model.search import num_reached
from weft.engine.scheduling import budget, pages, schedule
from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.pages import PagePool, names_of
from weft.engine.scheduling.schedule import Row, Scheduler, Sequence

DRAWN = 7
SMALL = {
    (pages, "PAGE"): 2,
    (schedule, "PAGE"): 2,
    (schedule, "GRAIN"): 1,
    (budget, "GRAIN"): 1,
    (budget, "PAGE"): 2,
    (budget, "FIRST_PIECE"): 3,  # of a prompt, in a step
    (schedule, "QUANTUM"): 2,
}


class Asked(NamedTuple):
    key: str
    prompt: tuple[int, ...]
    num_drawn: int
    salt: bytes = b""


ALIKE = Asked("a", (1, 1, 3, 3, 5), 2), Asked("a", (1, 1, 3, 3, 5), 2), Asked("b", (1, 1, 4), 3)
APART = Asked("a", (1, 1, 3, 3, 5), 1), Asked("a", (2, 2, 3, 3, 5), 1), Asked("b", (1, 1, 3, 3, 5), 1, b"other")


class Bounds(NamedTuple):
    asked: tuple[Asked, ...] = ALIKE
    num_pages: int = 6
    num_rests: int = 1  # of all texts together
    num_failed: int = 1  # steps


class Play:
    """One world, as it runs.

    Args:
        states: of each text: "new", "in", "resting" or "over".
    """

    def __init__(self, bounds: Bounds) -> None:
        self.schedule = Scheduler(PagePool(bounds.num_pages), Pace(), max_rows=2, max_running=3)
        self.texts = [Sequence(a.key, list(a.prompt), len(a.prompt) + a.num_drawn, a.salt) for a in bounds.asked]
        self.states = ["new"] * len(self.texts)
        self.num_rests, self.num_failed = bounds.num_rests, bounds.num_failed

    def begin(self, number: int) -> None:
        self.states[number] = "in"
        self.schedule.add(self.texts[number])

    def end(self, number: int) -> None:
        self.states[number] = "over"
        self.schedule.remove(self.texts[number])

    def rest(self, number: int) -> None:
        self.states[number], self.num_rests = "resting", self.num_rests - 1
        self.schedule.remove(self.texts[number])

    def go_on(self, number: int) -> None:
        self.states[number] = "in"
        self.schedule.add_again(self.texts[number])

    def step(self) -> None:
        rows = self._planned()
        self.schedule.done(rows)
        for row in rows:
            if row.draws:
                row.sequence.tokens.append(DRAWN)
                if len(row.sequence.tokens) == row.sequence.max_tokens:
                    self.end(self.texts.index(row.sequence))

    def fail(self) -> None:
        """A step is planned, and breaks off: who was in it hears of it."""
        self.num_failed -= 1
        for row in self._planned():
            self.end(self.texts.index(row.sequence))

    def _planned(self) -> list[Row]:
        rows = self.schedule.plan()
        for row in rows:
            written = row.sequence.pages[row.start // pages.PAGE : pages.num_pages(row.stop)]
            assert len(row.sequence.pages) >= pages.num_pages(row.stop), "a token has no page"
            others = {page for each in self.texts if each is not row.sequence for page in each.pages}
            if others & {*written} or any(map(self.schedule.pool.is_named, written)):
                raise Shared("what another holds, or may take up, is written to", row)
        return rows

    def acts(self) -> Iterator[tuple[Callable[..., None], *tuple[int, ...]]]:
        if "in" in self.states:
            yield (Play.step,)
            if self.num_failed:
                yield (Play.fail,)
        for number, state in enumerate(self.states):
            if state == "new":
                yield Play.begin, number
            elif state == "resting":
                yield Play.go_on, number
            elif state == "in":
                yield Play.end, number
                if self.num_rests:
                    yield Play.rest, number

    def check(self) -> None:
        pool = self.schedule.pool
        try:
            pool.check()
        except AssertionError as error:
            raise Lost(error) from None
        holders = Counter(page for text in self.texts for page in text.pages)
        if holders != Counter(pool._num_holders):
            raise Lost("pages are held by nobody, or by others than it is counted", holders, pool._num_holders)
        if any(text.pages for text, state in zip(self.texts, self.states, strict=True) if state != "in"):
            raise Lost("who is not here holds pages")
        for text in self.texts:
            if len({*text.pages}) < len(text.pages):
                raise Shared("a page is twice in one text", text)
            names = names_of(text.tokens[: text.num_read], text.salt)
            for page, name in zip(text.pages, [*names, *[b""] * len(text.pages)], strict=False):
                if pool._names.get(page, name) != name or (not name and holders[page] > 1):
                    raise Shared("a page is held that has another text, or was not read", text)

    def key(self) -> Any:
        """Return what tells worlds apart: pages are alike, so they are numbered as they come."""
        schedule, pool, numbers = self.schedule, self.schedule.pool, count()
        renamed = dict[int, int]()
        for page in (*(page for text in self.texts for page in text.pages), *pool._kept):
            renamed.setdefault(page, next(numbers))
        at = {text: number for number, text in enumerate(self.texts)}
        turns = sorted({text.drew_at for text in self.texts})
        texts = tuple(
            (len(text.tokens), text.num_read, *(renamed[page] for page in text.pages), turns.index(text.drew_at))
            for text in self.texts
        )
        return (
            texts,
            tuple(self.states),
            tuple(renamed[page] for page in pool._kept),
            frozenset((renamed.get(page, -1), name) for page, name in pool._names.items()),
            tuple(at[text] for text in schedule._running),
            tuple(sorted((key, *map(at.__getitem__, queue)) for key, queue in schedule._waiting.items())),
            tuple((key, schedule._deficit[key]) for key in schedule._turns),
            schedule._wants_room and at[schedule._wants_room],
            (self.num_rests, self.num_failed),
        )


class World:
    """A world that is told from others by its key."""

    def __init__(self, play: Play) -> None:
        self.play, self.key = play, play.key()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self.key == other.key

    def following(self) -> Iterator["World"]:
        for act, *number in self.play.acts():
            play = copy.deepcopy(self.play)
            act(play, *number)
            yield World(play)


class Wrong(AssertionError):
    pass


class Lost(Wrong):
    """Pages do not add up."""


class Shared(Wrong):
    """Two have one page that is not the same text."""


class Seen(NamedTuple):
    """
    Args:
        num_worlds: all of them.
        met: what happened in some.
    """

    num_worlds: int
    met: set[str]


def search(bounds: Bounds) -> Seen:
    """Look at every world.

    Raises:
        Wrong: in one of them.
    """
    met = set[str]()

    def check(world: World) -> None:
        world.play.check()
        pool = world.play.schedule.pool
        happened = {
            "shared": any(num > 1 for num in pool._num_holders.values()),
            "kept": pool.num_kept,
            "full": not pool.num_room,
            "gave up": world.play.schedule.num_yielded,
        }
        met.update(name for name, is_so in happened.items() if is_so)

    return Seen(num_reached(World(Play(bounds)), check, World.following), met)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)


QUICK = Bounds(num_pages=4, num_rests=0, num_failed=0)


@pytest.mark.parametrize(
    "bounds",
    [
        QUICK,
        QUICK._replace(asked=APART),
        pytest.param(QUICK._replace(num_rests=1), marks=pytest.mark.full),
        pytest.param(QUICK._replace(num_failed=1), marks=pytest.mark.full),
        pytest.param(Bounds(num_pages=4), marks=pytest.mark.slow),
        pytest.param(Bounds(num_pages=6), marks=pytest.mark.slow),
        pytest.param(Bounds(APART, num_pages=5), marks=pytest.mark.slow),
        pytest.param(Bounds(APART, num_pages=6), marks=pytest.mark.slow),
    ],
)
def test_pages_add_up_and_only_texts_that_begin_alike_share_them(bounds: Bounds) -> None:
    seen = search(bounds)
    assert seen.num_worlds > 500
    assert "kept" in seen.met
    assert ("shared" in seen.met) == (bounds.asked is ALIKE)
    assert {"full", "gave up"} <= seen.met or bounds.num_pages > 4 or bounds.asked is APART


def without_what_came_before(tokens: list[int], salt: bytes, before: list[bytes] = []) -> list[bytes]:  # noqa: B006
    ends = range(pages.PAGE, len(tokens) + 1, pages.PAGE)
    return [names_of(tokens[end - pages.PAGE : end], salt)[0] for end in ends]


def without_a_salt(tokens: list[int], salt: bytes, before: list[bytes] = []) -> list[bytes]:  # noqa: B006
    return names_of(tokens, b"", before)


def named_unread(scheduler: Scheduler, sequence: Sequence) -> None:
    before = len(sequence.names)
    sequence.names = names_of(sequence.tokens, sequence.salt, sequence.names)
    for page in range(before, len(sequence.names)):
        scheduler.pool.call(sequence.pages[page], sequence.names[page])


def never_let_go(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.pages, sequence.names, sequence.num_read = [], [], 0


def let_go_by_the_first(pool: PagePool, given: list[int]) -> None:
    for page in reversed(given):
        pool._num_holders.pop(page, None)
        if page in pool._names:
            pool._kept[page] = None
        else:
            pool._free.append(page)


def taken_and_kept(pool: PagePool, names: list[bytes], num_more: int) -> list[int] | None:
    known = [pool._by_name[name] for name in names]
    if num_more > pool.num_room:
        return None
    for page in known:
        pool._num_holders[page] = pool._num_holders.get(page, 0) + 1
    return [*known, *(pool._empty() for _ in range(num_more))]


def called_anew(pool: PagePool, page: int, name: bytes) -> None:
    pool._by_name[name], pool._names[page] = page, name


BROKEN: dict[str, tuple[tuple[Any, str, Any], tuple[Asked, ...], type[Wrong]]] = {
    "a name says what came before": ((schedule, "names_of", without_what_came_before), APART, Shared),
    "a name is behind a salt": ((schedule, "names_of", without_a_salt), APART, Shared),
    "what was not read has no name": ((Scheduler, "_name", named_unread), ALIKE, Shared),
    "who goes lets go": ((Scheduler, "_let_go", never_let_go), ALIKE, Lost),
    "a page is held until its last holder goes": ((PagePool, "release", let_go_by_the_first), ALIKE, Lost),
    "what is taken up is kept no longer": ((PagePool, "take", taken_and_kept), ALIKE, Lost),
    "a name stays with the page that has it": ((PagePool, "call", called_anew), ALIKE, Lost),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_of_pages_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (where, name, function), asked, found = BROKEN[rule]
    monkeypatch.setattr(where, name, function)
    with pytest.raises(found):
        search(QUICK._replace(asked=asked))
