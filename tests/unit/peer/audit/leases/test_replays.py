"""Leases made again from what a peer shows of them: what is equal, near, something else, or cannot be told."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields
from torch import Tensor

from unit.peer.audit.test_steps import ME, OTHER, head, trainer
from unit.peer.tiny import run_config
from weft.errors import DataError
from weft.ids import Digest, Round, Tokens
from weft.model.initial import initial_vector
from weft.peer.audit.heads import Head
from weft.peer.audit.leases.replays import NOT_KEPT, Before, Case, Ended, NotHere, Replayed, Replays, Shown
from weft.peer.audit.steps import LOCAL, repeat, shape_of, state_of
from weft.peer.audit.trace import tree_of
from weft.peer.messages import NamedState
from weft.run.amend import amended
from weft.store.chunks import chunks, state_index
from weft.sync.merge.method import OUTER, Method, Scope
from weft.sync.merge.reduce import cut, encode_payload
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import payload_of
from weft.sync.records.work import Segment, Work
from weft.training.trainer import Trainer
from weft.verify import judge
from weft.verify.judge import Numerics
from weft.wire import decode, digest, digest_of, encode

RUN = run_config(batch_size=2)
NUM = 3  # steps of a lease
State = dict[str, Tensor]


@dataclass
class Peer:
    """A peer that makes steps, and signs what it likes of them."""

    trainer: Trainer
    blobs: dict[str, bytes] = field(default_factory=dict)

    def keep(self, state: State) -> Digest:
        index = state_index(state)
        self.blobs[digest_of(index)] = encode(index)
        for vector in state.values():
            self.blobs |= {digest(chunk): bytes(chunk) for chunk in chunks(vector)}
        return digest_of(index)

    def blob(self, name: Digest) -> bytes:
        if name not in self.blobs:
            raise NotHere(name)
        return self.blobs[name]

    def replays(self, numerics: Numerics = "fp32") -> Replays:
        return Replays(self.trainer, RUN, numerics, self.blob)


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer(trainer(tmp_path))


def copied(state: State) -> State:
    return {name: vector.clone() for name, vector in state.items()}


def first_state(peer: Peer) -> State:
    zeros = {name: torch.zeros(num) for name, num in shape_of(peer.trainer).items()}
    return {**zeros, LOCAL: initial_vector(RUN.model, RUN.seed)}


def begun_at(outer: Tensor, number: int = 0, after: Head | None = None) -> Head:
    found = head()
    index = state_index({OUTER: outer})
    previous = found.manifest.previous if after is None else digest_of(after.manifest)
    here = with_fields(found.manifest, round=Round(number), previous=previous)
    return with_fields(found, manifest=here, outer=index.vectors[0])


def payload_for(case_head: Head, outer: Tensor, local: Tensor, round: int) -> Digest:
    method = Method(amended(RUN, case_head.charter).method, RUN.optimizer, RUN.vector.tensors)
    scope = Scope(outer.numel(), RUN.method.fragments)
    ranges = cut(scope.num_sent(round), case_head.manifest.uplinks)
    encoded, _ = encode_payload(method, scope, {OUTER: outer}, method.delta(outer, local), None, ranges, round)
    return payload_of(map(digest, encoded))


Change = Callable[[State], State]


def same(state: State) -> State:
    return state


def case_of(
    peer: Peer,
    *,
    begins: Change = same,
    ends: Change = same,
    moves: Change = same,
    num: int = NUM,
    num_segments: int = 2,
    **changes: Any,
) -> Case:
    """Return a work of some leases, each at other parameters than the one before.

    Args:
        begins, ends, moves: change what it begins with, what each lease came to, and what it was moved to.
        changes: fields of the work that are not so.
    """
    state, names = begins(first_state(peer)), list[Digest]()
    outer = initial_vector(RUN.model, RUN.seed)
    heads, outers, segments, firsts, lasts = list[Head](), list[Tensor](), list[Segment](), list[int](), list[int]()
    for number in range(num_segments):
        if number:
            after = outer * 1.01
            state = moves({**state, LOCAL: after.clone().sub_(outer - state[LOCAL])})
            outer = after
        here = begun_at(outer, number, heads[-1] if heads else None)
        segment = Segment(head=digest_of(here.manifest), round=Round(number), holder=ME, num_steps=num)
        heads, outers, segments = [*heads, here], [*outers, outer], [*segments, segment]
        firsts.append(len(names))
        names.append(peer.keep(state))

        def note(_num: int) -> None:
            names.append(digest_of(state_index(state_of(peer.trainer))))

        end = repeat(peer.trainer, RUN, here, segment, state, outer, number * num, 0, num, on_step=note)
        state = ends(end)
        lasts.append(len(names) - 1)
        names[-1] = peer.keep(state)
    tree = tree_of(bytes.fromhex("".join(names)))
    work = Work(
        run=RUN.run,
        branch=heads[-1].manifest.branch,
        round=Round(num_segments),
        peer=ME,
        segments=tuple(segments),
        follows=None,
        num_before=0,
        trace=tree.root(),
        payload=payload_for(heads[-1], outer, state[LOCAL], num_segments),
        tokens=Tokens(num_segments * num * heads[0].charter.settings.tokens_per_step),
        error=None,
        left=None,
    )
    named = [[NamedState(state=names[at], path=tree.path(at)) for at in found] for found in (firsts, lasts)]
    return Case(with_fields(work, **changes), heads, outers, Shown(tuple(named[0]), tuple(named[1])))


def outcomes(found: list[Replayed]) -> list[str]:
    return [each.outcome for each in found]


def other(state: State, by: float) -> State:
    return {**state, LOCAL: state[LOCAL] * (1 + by)}


def false_moments(state: State) -> State:
    return {**state, "moment1": state["moment1"] + 1e-3}


@pytest.mark.parametrize("numerics", ["fp32", "exact"])
def test_honest_leases_are_equal_and_leave_what_they_ended_with(peer: Peer, numerics: Numerics) -> None:
    case = case_of(peer)
    before = copied(state_of(peer.trainer))
    found, ended = peer.replays(numerics).check(case, [0, 1])
    assert outcomes(found) == ["equal", "equal"]
    assert ended is not None
    assert digest_of(state_index(ended.state)) == case.shown.ends[-1].state  # type: ignore[union-attr]
    assert all(torch.equal(value, before[name]) for name, value in state_of(peer.trainer).items())
    alone, ended = peer.replays(numerics).check(case, [0])
    assert (outcomes(alone), ended) == (["equal"], None)


def test_another_machine_comes_near_and_no_nearer_is_asked_for(peer: Peer) -> None:
    near = case_of(peer, ends=lambda state: other(state, 1e-7), num_segments=1)
    found, ended = peer.replays().check(near, [0])
    assert outcomes(found) == ["near"]
    assert 0 < found[0].distance < 1e-4
    assert ended is None, "its bits are not these"
    (far,), _ = peer.replays().check(case_of(peer, ends=lambda state: other(state, 1e-3), num_segments=1), [0])
    assert (far.outcome, far.why) == ("differs", "it came to other parameters by these training steps")
    (exact,), _ = peer.replays("exact").check(near, [0])
    assert exact.outcome == "differs"


def rounded_elsewhere(peer: Peer, num: int) -> Change:
    """Return what another machine comes to in place of a first lease: its sums are off by some roundings."""

    def end(mine: State) -> State:
        begin, here = first_state(peer), begun_at(initial_vector(RUN.model, RUN.seed))
        noise = torch.randn(len(begin[LOCAL]), generator=torch.Generator().manual_seed(1))
        off = 2.0**-21 * begin[LOCAL] * noise
        segment = Segment(head=digest_of(here.manifest), round=Round(0), holder=ME, num_steps=num)
        state = {**begin, LOCAL: begin[LOCAL] + off}
        found = repeat(peer.trainer, RUN, here, segment, state, begin[LOCAL], 0, 0, num)
        assert not torch.equal(found[LOCAL] - off, mine[LOCAL])
        return {**found, LOCAL: found[LOCAL] - off}

    return end


@pytest.mark.parametrize("num", [1, NUM])
def test_a_lease_that_rounding_leads_farther_than_usual_is_held_against_what_it_does_here(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """As where gradients are next to nothing: all else that is as far is something else."""
    case = case_of(peer, ends=rounded_elsewhere(peer, num), num_segments=1, num=num)
    (found,), _ = peer.replays().check(case, [0])
    assert (found.outcome, found.held) == ("near", judge.threshold("fp32", num))
    monkeypatch.setitem(judge.ONE_STEP, "fp32", found.distance / num / 2)
    (sensitive,), _ = peer.replays().check(case, [0])
    assert (sensitive.outcome, sensitive.distance) == ("near", found.distance)
    assert judge.threshold("fp32", num) < found.distance < sensitive.held < 2.5e-2 * num**0.5
    (false,), _ = peer.replays().check(case_of(peer, ends=longer, num_segments=1, num=num), [0])
    assert false.outcome == "differs"
    assert false.distance == pytest.approx(0.01, rel=0.01)
    assert found.distance < false.held < false.distance, "it is as far as rounding leads, whatever was signed"
    (bf16,), _ = peer.replays("bf16").check(case_of(peer, ends=longer, num_segments=1, num=num), [0])
    assert bf16.held == judge.threshold("bf16", num, is_new=True)


def longer(end: State) -> State:
    """Return what steps come to that are one hundredth longer."""
    start = initial_vector(RUN.model, RUN.seed)
    return {**end, LOCAL: end[LOCAL] + 0.01 * (end[LOCAL] - start)}


def test_leases_that_follow_each_other_are_held_against_the_same(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease begins where the one before has ended, which was near enough."""
    turns = iter([rounded_elsewhere(peer, NUM), same])
    case = case_of(peer, ends=lambda state: next(turns)(state))
    monkeypatch.setitem(judge.ONE_STEP, "fp32", 1e-6)
    monkeypatch.setitem(judge.MOMENTS, "fp32", 1e-6)
    found, ended = peer.replays().check(case, [0, 1])
    assert outcomes(found) == ["near", "equal"]
    assert ended is None
    assert found[0].held > judge.threshold("fp32", NUM)


def test_where_another_machine_does_not_keep_the_end_nothing_can_be_told(peer: Peer) -> None:
    case = case_of(peer, ends=lambda state: other(state, 1e-7), num_segments=1)
    index = peer.blobs[case.shown.ends[0].state]  # type: ignore[union-attr]
    for chunk in next(each for each in _index(index).vectors if each.name == LOCAL).chunks:
        del peer.blobs[chunk]
    assert outcomes(peer.replays().check(case, [0])[0]) == ["unknown"]


def _index(data: bytes) -> StateIndex:
    found: StateIndex = decode(data, StateIndex)
    return found


FALSE: dict[str, tuple[dict[str, Any], str]] = {
    "elsewhere": ({"begins": lambda state: other(state, 1e-3)}, "did not begin at the run's parameters"),
    "moments": ({"begins": false_moments}, "says that its optimizer is new"),
    "steps": ({"ends": lambda state: other(state, 1e-3)}, "came to another state"),
    "moved": ({"moves": lambda state: other(state, 1e-3)}, "did not keep what it had"),
    "payload": ({"payload": digest(b"another")}, "payload is not what"),
    "tokens": ({"tokens": Tokens(7)}, "other tokens"),
    "before": ({"num_before": 5}, "says that its optimizer is new"),
    "left": ({"left": digest(b"something")}, "what its codec left"),
}


@pytest.mark.parametrize("what", FALSE)
def test_what_was_signed_and_is_not_so_is_its_peers(peer: Peer, what: str) -> None:
    given, why = FALSE[what]
    found, ended = peer.replays("exact").check(case_of(peer, **given), [0, 1])
    assert ended is None
    assert any(each.outcome == "differs" and why in each.why for each in found), found


def test_leases_of_rounds_that_do_not_follow_each_other_are_its_peers_fault(peer: Peer) -> None:
    case = case_of(peer)
    apart = replace(case, heads=[case.heads[0], begun_at(case.outers[1], 1)])
    found, _ = peer.replays("exact").check(apart, [0, 1])
    assert {each.why for each in found} == {"its segments do not follow each other from round to round"}


def test_the_root_over_the_states_between_is_compared(peer: Peer) -> None:
    case = case_of(peer, num_segments=1)
    names = [case.shown.begins[0].state, digest(b"a"), digest(b"b"), case.shown.ends[0].state]  # type: ignore[union-attr]
    tree = tree_of(bytes.fromhex("".join(names)))
    named = [NamedState(state=names[at], path=tree.path(at)) for at in (0, NUM)]
    shown = Shown((named[0],), (named[1],))
    false = replace(case, work=with_fields(case.work, trace=tree.root()), shown=shown)
    (found,), _ = peer.replays("exact").check(false, [0])
    assert (found.outcome, "other states on the way" in found.why) == ("differs", True)


def test_what_has_no_path_to_what_was_signed_is_no_fault_of_who_signed(peer: Peer) -> None:
    case = case_of(peer, num_segments=1)
    assert case.shown is not None
    (begin,), (end,) = case.shown.begins, case.shown.ends
    forged = peer.keep(other(first_state(peer), 1e-3))
    for shown in (
        Shown((with_fields(begin, state=forged),), (end,)),
        Shown((begin,), (with_fields(end, state=forged),)),
    ):
        with pytest.raises(DataError, match="none that was signed"):
            peer.replays("exact").check(replace(case, shown=shown), [0])


def test_a_lease_that_nobody_shows_is_made_from_where_the_work_before_ended(peer: Peer) -> None:
    case = replace(case_of(peer), shown=None)
    found, ended = peer.replays("exact").check(case, [1])
    assert outcomes(found) == ["equal"], "its first work begins with a new optimizer"
    assert ended is not None
    follows = with_fields(case.work, follows=digest(b"before"))
    for unknown in (None, Before(case.work)):
        found, _ = peer.replays("exact").check(replace(case, work=follows, before=unknown), [1])
        assert [(each.outcome, each.why) for each in found] == [("unknown", NOT_KEPT)]
    others = Before(with_fields(case.work, peer=OTHER), None, ended)
    found, _ = peer.replays("exact").check(replace(case, work=follows, before=others), [1])
    assert [each.why for each in found] == ["its optimizer goes on from work that was not its own"]


@pytest.mark.parametrize(("numerics", "outcome"), [("exact", "differs"), ("fp32", "unknown")])
def test_only_in_exact_numbers_other_states_that_nobody_shows_are_a_fault(
    peer: Peer, numerics: Numerics, outcome: str
) -> None:
    case = case_of(peer, ends=lambda state: other(state, 1e-7), num_segments=1)
    found, ended = peer.replays(numerics).check(replace(case, shown=None), [0])
    assert (outcomes(found), ended) == ([outcome], None)


def test_a_work_that_goes_on_begins_with_the_optimizer_of_the_one_before(peer: Peer) -> None:
    first = case_of(peer, num_segments=1)
    _, ended = peer.replays("exact").check(first, [0])
    assert ended is not None
    assert first.shown is not None
    last = _index(peer.blobs[first.shown.ends[0].state])
    after = case_of(
        peer,
        begins=lambda state: {**ended.state, LOCAL: state[LOCAL]},
        num_segments=1,
        follows=digest(b"the first"),
        num_before=NUM,
    )
    # its steps were counted from 0 where it was made
    true = replace(after, before=Before(first.work, last, Ended(ended.state, None)))
    (found,), _ = peer.replays("exact").check(replace(true, before=Before(first.work)), [0])
    assert found.why == "it came to another state by these training steps"
    other_last = _index(peer.blobs[peer.keep(false_moments(ended.state))])
    (found,), _ = peer.replays("exact").check(replace(true, before=Before(first.work, other_last)), [0])
    assert found.why == "its optimizer does not go on from the work that it names"
    elsewhere = with_fields(true.work, num_before=NUM + 1)
    (found,), _ = peer.replays("exact").check(replace(true, work=elsewhere), [0])
    assert found.why == "it does not go on from the work that it names"
