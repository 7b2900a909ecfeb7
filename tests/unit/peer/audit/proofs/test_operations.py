"""What a worker shows of the operations of a step: what it can, once, and no list that speaks against itself."""

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from unit.verify.evidence.forge import ME
from unit.verify.evidence.program.signed import Step, signed_step
from weft.ids import Digest
from weft.peer.audit.proofs import operations
from weft.peer.audit.proofs.operations import MAX_OUTPUTS, Listing, listing_of
from weft.sync.records.index import StateIndex
from weft.sync.records.work import MadeStep
from weft.verify.evidence.operations import tree_of
from weft.verify.evidence.program.evaluate import as_words, held_nbytes, listed
from weft.wire import decode, digest, digest_of, unseal

FREE = 1 << 30  # bytes


def listing(step: Step, **said: object) -> Listing:
    """Return what a worker may be asked that has signed the step, and said some of it otherwise."""
    made = step.listing(**{"operations": UNSET, **said})  # type: ignore[arg-type]
    words = torch.from_numpy(step.made.words.astype(np.int64).reshape(3, -1))
    found = listing_of(step.charter, torch.from_numpy(step.made.parameters), words, made, {}, lambda: FREE)
    assert found is not None
    return found


def test_a_list_is_signed_and_can_be_fetched() -> None:
    step = signed_step()
    asked = listing(step)
    assert asked.answer(UNSET) is None
    asked.make(UNSET, ME)
    answer = asked.answer(UNSET)
    assert answer is not None
    assert answer.is_ready
    assert answer.made is not UNSET
    made = unseal(answer.made, MadeStep, lambda *_: True)
    assert replace(made, operations=UNSET) == asked.made
    assert made.operations == tree_of(step.names).root()
    data = bytes(asked.blobs[Digest(answer.listed or "")])
    assert data == b"".join(map(bytes.fromhex, step.names))
    assert digest(data) == answer.listed


def test_what_an_operation_came_to_can_be_fetched_as_it_was_listed() -> None:
    step = signed_step()
    asked, number = listing(step), step.made.numbered("0.scores")
    assert asked.answer(number) is None  # it is listed first
    asked.make(number, ME)
    assert asked.answer(number) is None
    asked.make(number, ME)
    answer = asked.answer(number)
    assert answer is not None
    assert answer.is_ready
    index = decode(asked.blobs[step.names[number]], StateIndex)
    assert index == listed(step.made.program, number, step.made.outputs[number])
    data = b"".join(bytes(asked.blobs[Digest(chunk)]) for chunk in index.vectors[0].chunks)
    assert data == as_words(step.made.outputs[number]).tobytes()
    assert all(digest(bytes(blob)) == name for name, blob in asked.blobs.items())


def test_some_operations_are_shown_and_no_more() -> None:
    asked = listing(signed_step())
    asked.make(UNSET, ME)
    for number in range(MAX_OUTPUTS):
        assert asked.answer(number) is None
    for number in (MAX_OUTPUTS, 10_000):
        answer = asked.answer(number)
        assert answer is not None
        assert not answer.is_ready
        assert not answer.is_under_way
    assert asked.answer(0) is None


@pytest.mark.parametrize("said", [{"gradient": digest(b"another")}, {"norm": 1.0}])
def test_a_list_that_comes_to_another_gradient_is_not_signed(said: dict[str, object]) -> None:
    asked = listing(signed_step(), **said)
    asked.make(UNSET, ME)
    answer = asked.answer(UNSET)
    assert answer is not None
    assert (answer.is_ready, answer.is_under_way, answer.made) == (False, False, UNSET)
    assert "not what the operations of a step come to" in answer.reason


def test_who_has_no_memory_for_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it begins, for a system that lends more than it has ends the process later on."""
    asked, named, made = listing(signed_step()), operations.named, list[object]()
    monkeypatch.setattr(operations, "named", lambda *given: made.append(given) or named(*given))
    asked.free = lambda: held_nbytes(asked.program)
    asked.make(UNSET, ME)
    answer = asked.answer(UNSET)
    assert answer is not None
    assert "no memory" in answer.reason
    assert made == []
    enough = listing(signed_step())
    enough.free = lambda: 3 * held_nbytes(asked.program)
    enough.make(UNSET, ME)
    assert enough.names is not None


def test_nothing_is_listed_of_other_batches_and_of_runs_that_do_not_say_what_gradients_are() -> None:
    step = signed_step()
    parameters, made = torch.from_numpy(step.made.parameters), step.listing()
    words = torch.from_numpy(step.made.words.astype(np.int64).reshape(3, -1))
    assert listing_of(step.charter, parameters, words[:2], made, {}, lambda: FREE) is None
    audits = step.charter.audits
    assert audits
    assert audits.exact
    silent = replace(step.charter, audits=replace(audits, exact=replace(audits.exact, gradient=UNSET)))
    assert listing_of(silent, parameters, words, made, {}, lambda: FREE) is None
    assert digest_of(step.charter) != digest_of(silent)
