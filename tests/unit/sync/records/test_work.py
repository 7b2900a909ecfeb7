"""The states that a work names, and the steps between them."""

from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.sync.records.work import Segment, links, num_states, state_before

PEER = PeerId("aa" * 32)
some_segments = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def segments(steps: list[int]) -> list[Segment]:
    return [Segment(head="0" * 64, round=number, holder=PEER, num_steps=num) for number, num in enumerate(steps)]


@given(some_segments, st.integers(1, 9))
def test_links_cover_each_step_once_and_lead_from_state_to_state(steps: list[int], every: int) -> None:
    made = segments(steps)
    found = links(made, every)
    for number, num in enumerate(steps):
        mine = [link for link in found if link.segment == number]
        assert [step for link in mine for step in range(link.first, link.first + link.num_steps)] == list(range(num))
        start = state_before(made, every, number)
        assert [link.before for link in mine] == list(range(start, start + len(mine)))
    assert all(1 <= link.num_steps <= every for link in found)
    # Each state is the first of a segment, or comes after a link.
    states = {state_before(made, every, number) for number in range(len(made))} | {link.before + 1 for link in found}
    assert states == set(range(num_states(made, every)))


def test_a_segment_of_no_steps_has_one_state_and_no_link() -> None:
    made = segments([3, 0])
    assert num_states(made, 2) == 4
    assert [(link.segment, link.first, link.num_steps, link.before) for link in links(made, 2)] == [
        (0, 0, 2, 0),
        (0, 2, 1, 1),
    ]
