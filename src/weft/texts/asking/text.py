"""A text as the peer has it that asks for it: its tokens, along which path they come, and what happens when none do.

    seeking ──path──► opening ──all have answered──► running ──ends──► ended
       ▲                 │ one does not, or cannot        │ a member is gone, or nothing came in time
       ├─────────────────┴────────────────────────────────┤
       └───────── its reader goes on ──────── resting ◄───┘ its reader is behind: members forget it

The tokens are here, and nowhere else for good. Members have keys and values, and a log of what they sent on; whatever
happens to them, a new attempt opens a path, hears what each of its members has (`Held`), and says to each what to keep
and from where to send on (`plan`). So a member that is new is given what it lacks by the log of the stage before it;
where that reaches back no further, by the one before that, which computes again; in the end by the tokens.

Pure: `step(state, event) -> (state, effects)`. A token that was told is never taken back.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.engine.draw import Drawn
from weft.engine.scheduling.pages import PAGE
from weft.ids import PeerId
from weft.texts.chain import chain_of, places
from weft.texts.sequence import Held, Marks

MAX_FUTILE = 6  # attempts in a row that brought the text no further: it has failed
MAX_SAME = 1  # of those, on one path, before whoever is behind is taken for the cause

Phase = Literal["seeking", "opening", "running", "resting", "ended"]
Ending = Literal["stop", "length", "cancelled"]
Failed = Literal["no path", "stalled"]


class Text(NamedTuple):
    """
    Args:
        tokens: the prompt, and what was drawn.
        most: tokens of both together.
        chain: of all tokens.
        path: a member of each stage.
        held: what each has answered to this attempt.
        suspects: who did not answer, or held the path up, since the last token.
        behind: members of earlier paths, with their stage, that may still have something of the text.
        reach: tokens that all members of this path had taken together at most, since the last token; -1: nobody asked.
        num_futile: attempts that came after another on their path, and found no more there.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    most: int
    key: bytes
    chain: tuple[bytes, ...]
    stop_ids: frozenset[int] = frozenset()
    phase: Phase = "seeking"
    attempt: int = -1
    path: tuple[PeerId, ...] = ()
    held: tuple[Held | None, ...] = ()
    suspects: frozenset[PeerId] = frozenset()
    behind: frozenset[tuple[int, PeerId]] = frozenset()
    reach: int = -1
    num_futile: int = 0


# --- events ---


@dataclass(frozen=True)
class Found:
    """A path; None: there is none."""

    path: tuple[PeerId, ...] | None


@dataclass(frozen=True)
class Answered:
    """A member has said what it has; None: it takes no part in this attempt."""

    attempt: int
    stage: int
    held: Held | None


@dataclass(frozen=True)
class Drew:
    """The last stage's member has drawn the token at a place.

    Args:
        chain: of the tokens before.
        is_whole: nothing may follow it: an answer of a form is complete.
    """

    attempt: int
    place: int
    chain: bytes
    drawn: Drawn
    is_whole: bool = False


@dataclass(frozen=True)
class Lost:
    """A member is gone, or cannot go on with this attempt.

    Args:
        why: its own word for it, or "parted".
    """

    attempt: int
    peer: PeerId
    why: str = "parted"


@dataclass(frozen=True)
class Overdue:
    """Nothing has come for longer than it should take."""

    attempt: int


@dataclass(frozen=True)
class Unread:
    """Its reader is behind."""


@dataclass(frozen=True)
class Read:
    """Its reader is behind no more."""


@dataclass(frozen=True)
class Cancelled:
    pass


Event = Found | Answered | Drew | Lost | Overdue | Unread | Read | Cancelled


def why(event: Event) -> str:
    """Return in a word what an event that ends an attempt says of it."""
    match event:
        case Lost(why=said):
            return said
        case Overdue():
            return "silent"
        case Unread():
            return "unread"
        case _:
            return "declined"


# --- effects ---


@dataclass(frozen=True)
class Seek:
    """Find a path, where there is one without these members."""

    without: frozenset[PeerId]


@dataclass(frozen=True)
class Open:
    attempt: int
    path: tuple[PeerId, ...]


@dataclass(frozen=True)
class Resume:
    """Tell a member what to keep, and from where to send on."""

    attempt: int
    stage: int
    peer: PeerId
    keep: int
    send_from: int


@dataclass(frozen=True)
class Feed:
    """Give the first stage's member the tokens from a place on."""

    attempt: int
    peer: PeerId
    start: int


@dataclass(frozen=True)
class Close:
    """Let members forget the text, unless they are in a later attempt by then."""

    attempt: int
    members: tuple[tuple[int, PeerId], ...]  # and the stage of each


@dataclass(frozen=True)
class Tell:
    drawn: Drawn


@dataclass(frozen=True)
class End:
    ending: Ending


@dataclass(frozen=True)
class Fail:
    why: Failed


Effect = Seek | Open | Resume | Feed | Close | Tell | End | Fail
Moved = tuple[Text, list[Effect]]


def begun(
    prompt: Sequence[int], max_new_tokens: int, key: bytes, stop_ids: Collection[int] = (), context: int | None = None
) -> Moved:
    """Return a text that begins."""
    most = len(prompt) + max_new_tokens if context is None else min(context, len(prompt) + max_new_tokens)
    text = Text(tuple(prompt), len(prompt), most, key, chain_of(key, prompt), frozenset(stop_ids))
    if len(prompt) >= most:
        return text._replace(phase="ended"), [End("length")]
    return text, [Seek(frozenset())]


def with_key(text: Text, key: bytes) -> Text:
    """Return the text for other weights: its tokens stay."""
    return text._replace(key=key, chain=chain_of(key, text.tokens), reach=-1)


def marks_of(text: Text) -> Marks:
    at = places(len(text.tokens))
    return Marks(at, tuple(text.chain[place] for place in at))


def held_by(text: Text) -> dict[PeerId, int]:
    """Return how much of the text each member of its path may have: what it answered; all of it where it has not yet,
    or was given the rest since."""
    is_given = None not in text.held
    each_held = zip(text.path, text.held, strict=False)
    return {peer: len(text.tokens) if is_given or each is None else each.num for peer, each in each_held}


def step(text: Text, event: Event) -> Moved:
    if text.phase == "ended":
        return text, []
    match event:
        case Found(path=path):
            return _found(text, path)
        case Answered():
            return _answered(text, event)
        case Drew():
            return _drew(text, event)
        case Lost(attempt=attempt, peer=peer):
            is_in_it = attempt == text.attempt and peer in text.path and text.phase in ("opening", "running")
            return _seek(text, suspects={peer}) if is_in_it else (text, [])
        case Overdue(attempt=attempt):
            return _overdue(text) if attempt == text.attempt else (text, [])
        case Unread():
            return _rested(text) if text.phase == "running" else (text, [])
        case Read():
            return _seek(text) if text.phase == "resting" else (text, [])
        case Cancelled():
            return _ended(text, End("cancelled"))


def _found(text: Text, path: tuple[PeerId, ...] | None) -> Moved:
    if text.phase != "seeking":
        return text, []
    if path is None:
        return _ended(text, Fail("no path"))
    attempt = text.attempt + 1
    behind = (text.behind | set(enumerate(text.path))) - set(enumerate(path))
    reach = text.reach if path == text.path else -1
    text = text._replace(phase="opening", attempt=attempt, path=path, behind=behind, reach=reach)
    opening = text._replace(held=(None,) * len(path))
    return opening, [Open(attempt, path)]


def _answered(text: Text, event: Answered) -> Moved:
    if text.phase != "opening" or event.attempt != text.attempt or text.held[event.stage] is not None:
        return text, []
    if event.held is None:
        return _seek(text, suspects={text.path[event.stage]})
    held = (*text.held[: event.stage], event.held, *text.held[event.stage + 1 :])
    text = text._replace(held=held)
    if None in held:
        return text, []
    return _resumed(text, [each for each in held if each is not None])


def _resumed(text: Text, held: list[Held]) -> Moved:
    reach = sum(each.num for each in held)
    if text.reach >= 0:
        text = text._replace(num_futile=0 if reach > text.reach else text.num_futile + 1)
    text = text._replace(reach=max(reach, text.reach))
    if text.num_futile > MAX_FUTILE:
        return _ended(text, Fail("stalled"))
    if text.num_futile > MAX_SAME:
        behind = next((peer for peer, each in zip(text.path, held, strict=True) if each.num < len(text.tokens)), None)
        behind = text.path[-1] if behind is None else behind
        if behind not in text.suspects:
            return _seek(text, suspects={behind})
    orders, start = plan(held, len(text.tokens) - 1)
    effects: list[Effect] = [
        Resume(text.attempt, stage, peer, keep, send_from)
        for stage, (peer, (keep, send_from)) in enumerate(zip(text.path, orders, strict=True))
    ]
    return text._replace(phase="running"), [*effects, Feed(text.attempt, text.path[0], start)]


def plan(held: Sequence[Held], wanted: int) -> tuple[list[tuple[int, int]], int]:
    """Return what each stage's member keeps, and from which place it sends on; and where the tokens begin.

    What is not kept whole is kept up to the end of a page: of what lies within pages that another text filled nobody
    knows the chain.

    Args:
        held: by each.
        wanted: the place after which the last stage is to draw first.
    """
    orders = list[tuple[int, int]]()
    for each in reversed(held):
        keep = each.num
        if each.log_from > wanted and keep > wanted:  # it computes again what it sends on
            keep = wanted // PAGE * PAGE
        orders.append((keep, wanted))
        wanted = keep
    return orders[::-1], wanted


def _drew(text: Text, event: Drew) -> Moved:
    if not is_next(text, event):
        return text, []
    effects = list[Effect]()
    if event.attempt == text.attempt and text.behind:
        effects.append(Close(text.attempt, tuple(sorted(text.behind))))
        text = text._replace(behind=frozenset())
    if event.drawn.token in text.stop_ids:
        ended, ending = _ended(text, End("stop"))
        return ended, effects + ending
    text = text._replace(
        tokens=(*text.tokens, event.drawn.token),
        chain=text.chain + chain_of(text.key, (event.drawn.token,), text.chain[-1])[1:],
        suspects=frozenset(),
        reach=-1,
        num_futile=0,
    )
    effects.append(Tell(event.drawn))
    if len(text.tokens) < text.most and not event.is_whole:
        return text, effects
    ended, ending = _ended(text, End("stop" if len(text.tokens) < text.most else "length"))
    return ended, effects + ending


def is_next(text: Text, event: Drew) -> bool:
    """Return whether a token is the text's next one."""
    is_current = event.attempt == text.attempt if text.phase == "running" else event.attempt <= text.attempt
    is_there = text.phase != "ended" and is_current and event.place == len(text.tokens)
    return is_there and is_same(event.chain, text.chain[-1])


def is_same(chain: bytes, own: bytes) -> bool:
    """Return whether a token was drawn after the tokens that were told: rule (1) of `sequence`, on this side."""
    return chain == own


def _overdue(text: Text) -> Moved:
    if text.phase == "running":
        return _seek(text, same=text.path)
    if text.phase == "opening":
        silent = {peer for peer, each in zip(text.path, text.held, strict=True) if each is None}
        return _seek(text, suspects=silent)
    return text, []


def _seek(text: Text, suspects: Collection[PeerId] = (), same: tuple[PeerId, ...] = ()) -> Moved:
    text = text._replace(phase="seeking", suspects=text.suspects | frozenset(suspects))
    if same:
        return _found(text, same)
    return text, [Seek(text.suspects)]


def _rested(text: Text) -> Moved:
    return text._replace(phase="resting", behind=frozenset(), path=(), held=(), reach=-1), _closing(text)


def _ended(text: Text, how: End | Fail) -> Moved:
    return text._replace(phase="ended", behind=frozenset()), [*_closing(text), how]


def _closing(text: Text) -> list[Effect]:
    members = text.behind | set(enumerate(text.path))
    return [Close(text.attempt, tuple(sorted(members)))] if members else []
