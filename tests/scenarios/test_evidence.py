"""Members that are struck out by what they have signed: nobody votes, and honest work yields nothing."""

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from scenarios.cheats import always, bring_more
from scenarios.test_audits import ALWAYS, BY_EVIDENCE, EXACT, METHODS, play, proven, struck_out
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Int8Config
from weft.events import ActEnacted, LieProven, WorkTakenOut
from weft.ids import Digest, PeerId
from weft.peer.audit.auditor import Auditor
from weft.peer.audit.merges import Merge, Merges
from weft.peer.audit.outcome import Found
from weft.peer.audit.proofs import operations, proving
from weft.peer.audit.proofs.operations import Listing
from weft.peer.audit.trace import Trace
from weft.peer.audit.worker import Worker
from weft.sim.scenario import Way
from weft.sync.merge.reduce import EncodedPart
from weft.sync.method.choices import Choices, InnerSgdConfig, NesterovConfig
from weft.sync.method.presets import FedAvgConfig, MethodConfig
from weft.sync.records.acts import Warrant
from weft.training.steps import Mean
from weft.training.trainer import Trainer
from weft.verify.evidence.operations import length_name
from weft.verify.evidence.records import Falsehood
from weft.verify.evidence.shown import Unproven
from weft.wire import Signed, Signer, digest


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return why nothing was proven, and how often."""
    why = Counter[str]()

    def proof(letters: Any, prove: Callable[[], Falsehood]) -> Warrant | None:
        assert all(isinstance(letter, Signed) for letter in letters)
        with pytest.raises(Unproven) as found:
            prove()
        why[str(found.value)] += 1
        return None

    monkeypatch.setattr(proving, "proof", proof)
    return why


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [METHODS[0], pytest.param(FedAvgConfig(every=3, proximal=0.1), marks=pytest.mark.slow)],
    ids=lambda each: type(each).__name__,
)
def test_no_honest_step_and_no_honest_part_is_evidence(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, unproven: Counter[str], method: MethodConfig
) -> None:
    """Of each audit that finds nothing, evidence is looked for as if it had."""
    swarm = make_swarm(method=method, trust=EXACT, num_rounds=4, num_peers=3, learns=True)
    act, look, alone = Auditor._act, Merges.look, asyncio.Lock()

    async def looked(auditor: Auditor, audit: Any, looking: Any, shown: Any) -> Any:
        event = await act(auditor, audit, looking, shown)
        if looking.phase == "opening":
            theirs = await auditor._checks.pulled(audit, shown.theirs)
            assert await auditor._proof_of_step(audit, shown, theirs) is None
        return event

    async def merged(merges: Merges, merge: Merge) -> Found | None:
        """Look twice, the second time as a machine that merges wrongly."""
        async with alone:
            found, again = await look(merges, merge), merges._rounds.merger.again

            async def wrong(*given: Any) -> EncodedPart:
                right = bytes((await again(*given)).encoded)
                return EncodedPart(encoded=right[:-1] + bytes([right[-1] ^ 1]), digest=digest(b"another"))

            with monkeypatch.context() as patch:
                patch.setattr(merges._rounds.merger, "again", wrong)
                doubted = await look(merges, merge)
        assert doubted is None or doubted.proof is None
        return found

    monkeypatch.setattr(Auditor, "_act", looked)
    monkeypatch.setattr(Merges, "look", merged)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abc")))

    swarm.run(scenario)
    assert unproven["the numbers are the optimizer's"] >= 3
    if isinstance(method, FedAvgConfig):
        return
    assert unproven["the block is the mean of what was brought"] >= 3
    assert len(unproven) == 2


@pytest.mark.full
def test_a_payload_longer_than_its_steps_is_evidence(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Choices(every=2, send="delta", apply=NesterovConfig(lr=0.7, momentum=0.3), codec=Int8Config())
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=6, num_peers=4, learns=True)
    bring_more(monkeypatch, lambda carry: carry is swarm.member("d").life.peer._carry, 2.0)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its payload is not what its training steps came to"
    assert {event.member for life in swarm.lives for event in life.seen(WorkTakenOut)} == {swarm.member("d").id}


@pytest.mark.full
def test_an_optimizer_that_is_not_the_last_work_s_is_evidence(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=8, num_peers=4, learns=True)
    begin = Trace.begin

    def other(trace: Trace, head: Any, holder: Any) -> None:
        if trace is swarm.member("d").life.peer._trace and head.round > 2:
            begun = trace._open is not None and trace._open.pieces
            trace._trainer._optimizer._moments["moment1"].mul_(1.0 if begun else 1.5)
            monkeypatch.setattr(trace, "_follow", lambda: None)
        begin(trace, head, holder)

    monkeypatch.setattr(Trace, "begin", other)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its optimizer does not go on from the work that it names"


@pytest.mark.slow
def test_plain_sgd_at_another_rate_is_evidence(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(
        method=METHODS[0],
        trust=EXACT,
        num_rounds=24,
        num_peers=4,
        learns=True,
        train={"optimizer": InnerSgdConfig(momentum=0.9)},
    )
    made = count()
    swarm.make_trainer = lambda *given: (always("slower") if next(made) == 3 else Trainer)(*given)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its optimizer did not make this training step"


@pytest.mark.slow
def test_who_signs_no_step_is_judged_by_a_majority(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=24, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (always("slower") if next(made) == 3 else Trainer)(*given)
    monkeypatch.setattr(Worker, "_signed", lambda *_: UNSET)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm).startswith("it came to other parameters")
    assert [event for life in swarm.lives for event in life.seen(LieProven)] == []


# --- gradients ---


class MadeUp(Trainer):
    def _descend(self, norm: float, rate: float) -> float:
        self._model.gradient.mul_(-1)
        return super()._descend(norm, rate)


@pytest.mark.slow
def test_a_gradient_that_was_made_up_is_judged_by_a_majority(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits the states, and is not the batch's: only who makes the step again can tell."""

    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=24, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (MadeUp if next(made) == 3 else Trainer)(*given)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm).startswith("it came to other")
    enacted = {event.by for life in swarm.lives for event in life.seen(ActEnacted)}
    assert all(len(by) >= 3 for by in enacted)


def lies(make: Callable[..., Trainer]) -> Callable[..., Trainer]:
    """Return what makes the trainers of a, b, c and d, of which the last is one of these."""
    made = count()
    return lambda *given: (make if next(made) == 3 else Trainer)(*given)


@pytest.mark.full
@pytest.mark.parametrize("way", ["other text", pytest.param("one other sample", marks=pytest.mark.slow)])
def test_samples_other_than_the_leased_ones_are_evidence(make_swarm: MakeSwarm, way: Way) -> None:
    num_rounds = 8 if way == "other text" else 24  # of one sample an audit finds little: it takes longer
    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=num_rounds, num_peers=4, learns=True)
    swarm.make_trainer = lies(always(way))
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its gradient is not that of its samples (words)"


@pytest.mark.slow
def test_half_a_batch_twice_is_evidence(make_swarm: MakeSwarm) -> None:
    class Half(Trainer):
        def _fill(self, positions: NDArray[np.int64]) -> Mean:
            half = positions[: len(positions) // 2]
            return super()._fill(np.concatenate((half, half)))

    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=24, num_peers=4, learns=True, train={"batch_size": 4})
    swarm.make_trainer = lies(Half)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its gradient is not that of its samples (words)"


@pytest.mark.slow
def test_a_gradient_that_was_made_up_and_is_listed_is_evidence(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists the operations as they should be, and at their end the gradient that it went along."""
    make = Listing.make

    def false(listing: Listing, number: int | UnsetType, signer: Signer) -> None:
        program, made = listing.program, listing.made
        if number is UNSET or listing.names is None:
            right = operations.named(program, listing.parameters, listing.words)
            right[program.gradient], right[-1] = Digest(made.gradient), length_name(program, made.norm)
            with monkeypatch.context() as patch:
                patch.setattr(operations, "named", lambda *_: right)
                make(listing, number, signer)
        elif number == program.gradient:
            listing.outputs.add(number)  # it can be fetched already
        else:
            make(listing, number, signer)

    monkeypatch.setattr(Listing, "make", false)
    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=24, num_peers=4, learns=True)
    swarm.make_trainer = lies(MadeUp)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its gradient is not that of its samples (samples 0 to 1: gradient)"


@pytest.mark.slow
def test_a_gradient_of_other_parameters_is_evidence(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(Trainer):
        def _fill(self, positions: NDArray[np.int64]) -> Mean:
            held = self._vector.clone()
            self._vector.mul_(0.5)
            found = super()._fill(positions)
            self._vector.copy_(held)
            return found

    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=24, num_peers=4, learns=True)
    swarm.make_trainer = lies(Stale)
    told = Worker._listing

    def stale(worker: Worker, *given: Any) -> Listing | None:
        found = told(worker, *given)
        if found is not None and worker._context.node.peer == swarm.member("d").id:
            found.parameters = found.parameters * np.float32(0.5)
        return found

    monkeypatch.setattr(Worker, "_listing", stale)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its gradient is not that of its samples (embed.turned)"


@pytest.mark.full
def test_a_list_that_is_not_shown_is_judged_by_a_majority(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=7, num_peers=4, learns=True)
    swarm.make_trainer = lies(always("other text"))
    told = Worker._lookup

    def hidden(worker: Worker, peer: PeerId, wanted: Digest) -> Any:
        is_list = any(each.listing is not None and each.listing.blob == wanted for each in worker._shown.values())
        return None if is_list else told(worker, peer, wanted)

    monkeypatch.setattr(Worker, "_lookup", hidden)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm).startswith("it came to other")
