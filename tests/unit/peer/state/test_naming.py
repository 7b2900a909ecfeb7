"""What a peer makes of how others name the state that it was given."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from model.world import first_base
from weft.events import Event, StateContradicted
from weft.ids import Attempt, Digest, PeerId
from weft.peer.chain import open_branch
from weft.peer.state.naming import StateNaming
from weft.sync.records.messages import Accept, Manifest
from weft.wire import digest, digest_of

BASE = first_base(5)
A, B, C, D, E = BASE.electorate
NEWCOMER = PeerId("ff" * 32)
HEAD = open_branch(BASE, list(BASE.electorate), A, BASE.branch)
MINE, OTHER = digest(b"mine"), digest(b"other")


class Given:
    """A newcomer that was given a state by `A`."""

    def __init__(self) -> None:
        self.events = list[Event]()
        self.head = HEAD
        self.replica: Any = SimpleNamespace(head=HEAD)
        context: Any = SimpleNamespace(node=SimpleNamespace(peer=NEWCOMER), emit=self.events.append)
        self.naming = StateNaming(context, self.replica)
        self.naming.came_from((A,))

    def hears(self, names: Mapping[PeerId, Digest | None]) -> tuple[PeerId, ...] | None:
        """Return whom it distrusts after the next round, with these votes."""
        self.naming._of, self.naming._name = digest_of(self.head), MINE
        self.head = after(self.head)
        votes = {
            peer: Accept(attempt=Attempt(0), manifest=digest_of(self.head), state=UNSET if name is None else name)
            for peer, name in names.items()
        }
        found = self.naming.contradiction(self.head, votes)
        self.replica.head = self.head
        return found


def after(head: Manifest) -> Manifest:
    return replace(head, round=head.round + 1, previous=digest_of(head))


def test_what_most_members_name_otherwise_is_false() -> None:
    given = Given()
    assert given.hears(dict.fromkeys((A, B, C), OTHER)) == (A,)
    assert [type(event) for event in given.events] == [StateContradicted]


def test_a_few_whose_votes_alone_are_shown_take_no_right_state_from_a_newcomer() -> None:
    """Three votes of five prove a round, whichever: two that lie show it with one honest vote."""
    given = Given()
    for _ in range(8):
        assert given.hears({A: MINE, D: OTHER, E: OTHER}) is None
    assert not any(isinstance(event, StateContradicted) for event in given.events)
    assert not given.naming.is_sure


def test_where_most_are_new_and_name_none_the_others_are_enough() -> None:
    given = Given()
    assert given.hears({A: OTHER, C: None}) is None, "who is not heard may say otherwise"
    assert given.hears({A: OTHER, D: None}) is None
    assert given.hears({A: OTHER, B: OTHER, E: None}) == (A,)


def test_members_that_are_heard_one_after_the_other_are_most_of_them_too() -> None:
    given = Given()
    assert given.hears({A: OTHER, B: OTHER}) is None
    assert given.hears({A: OTHER, C: OTHER}) == (A,)
    given = Given()
    assert given.hears({A: OTHER, B: OTHER}) is None
    assert given.hears({A: MINE, C: OTHER}) is None, "what each has said last"


def test_of_two_members_the_word_of_one_is_enough_for_who_was_given_its_state() -> None:
    given = Given()
    given.replica.head = given.head = replace(HEAD, members=(A, B))
    assert given.hears({B: OTHER}) == (A,)
