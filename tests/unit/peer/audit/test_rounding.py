"""A single step in fp32 that rounding leads farther than usual is held against what rounding makes of it here."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from unit.peer.audit.test_auditor import ME as SIGNER
from unit.peer.audit.test_auditor import WORK
from unit.peer.audit.test_steps import RUN, copied, head, segment, trainer
from weft.ids import Round
from weft.peer.audit import auditor, checks
from weft.peer.audit.auditor import Auditor, _Shown
from weft.peer.audit.checks import Audit
from weft.peer.audit.heads import Head
from weft.peer.audit.outcome import Found
from weft.peer.audit.steps import LOCAL, NOT_MADE, repeat, some_roundings_off, state_of
from weft.run.trust import AuditedTrust
from weft.store.chunks import state_index
from weft.sync.records.work import link
from weft.tasks import Inline, Tasks
from weft.training.trainer import Trainer
from weft.verify import judge
from weft.wire import digest, seal

State = dict[str, Tensor]
NUM_BEFORE = 8  # steps of the optimizer
AUDITED = replace(RUN, trust=AuditedTrust(numerics="fp32"))


class Looked:
    """A step that an auditor has made again; another machine came to something else."""

    def __init__(self, path: Path) -> None:
        self.trainer: Trainer = trainer(path)
        self.trainer.train(torch.arange(2 * NUM_BEFORE).numpy(), 0, 1)
        self.before = copied(state_of(self.trainer))
        self.mine = self.step(self.before)

    def step(self, state: State) -> State:
        return repeat(self.trainer, RUN, head(), segment(), state, self.before[LOCAL], NUM_BEFORE, 0, 1)

    def elsewhere(self) -> State:
        """Return what another processor comes to: its sums are off by some roundings."""
        noise = torch.randn(len(self.before[LOCAL]), generator=torch.Generator().manual_seed(1))
        off = 2.0**-22 * noise * self.before[LOCAL]
        found = self.step({**self.before, LOCAL: self.before[LOCAL] + off})
        return {**found, LOCAL: found[LOCAL] - off}

    def found(
        self, theirs: State, monkeypatch: pytest.MonkeyPatch, run: Any = AUDITED, known: Head | None = None
    ) -> Found:
        """Return what an auditor says of it.

        Args:
            known: what it knows of where the lease began.
        """

        async def pulled(*_: Any) -> State:
            return theirs

        monkeypatch.setattr(checks, "shape_of", lambda _trainer: ())
        monkeypatch.setattr(checks, "StateClient", lambda *_: None)
        context: Any = SimpleNamespace(compute=Inline(), node=None, clock=None, learner_lock=asyncio.Lock())
        replica: Any = SimpleNamespace(run=run)
        heads: Any = SimpleNamespace(known=lambda _digest: known)
        rounds: Any = SimpleNamespace(works=SimpleNamespace(signed=lambda _name: None))
        nothing: Any = SimpleNamespace()
        made = Auditor(
            *(context, self.trainer, replica, rounds, heads, nothing, nothing, nothing, Tasks()),
            lambda _audit, _found: None,
        )
        monkeypatch.setattr(made._checks, "pulled", pulled)
        shown = _Shown(
            before=self.before,
            mine=self.mine,
            own=state_index(self.mine),
            theirs=state_index(theirs),
            begun=(self.before[LOCAL], head()),
        )
        work = replace(WORK, segments=(segment(),), num_before=NUM_BEFORE)
        audit = Audit(Round(1), digest(b"the signed work"), work, link(work.segments, 1, 0), seal(SIGNER, work))
        return asyncio.run(made._compared(audit, shown))


def test_a_step_is_held_against_what_rounding_makes_of_it_where_that_is_more_than_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where numbers nearly cancel: what others round otherwise is then as far as a cheat is elsewhere."""
    looked, drawn = Looked(tmp_path), list[int]()

    def noted(state: State, number: int) -> State:
        drawn.append(number)
        return some_roundings_off(state, number)

    monkeypatch.setattr(auditor, "some_roundings_off", noted)
    usual = looked.found(looked.elsewhere(), monkeypatch)
    assert (usual.outcome, usual.apart.held if usual.apart else 0.0) == ("equal", judge.MOMENTS["fp32"])
    assert usual.apart is not None
    for held in (judge.ONE_STEP, judge.MOMENTS):
        monkeypatch.setitem(held, "fp32", usual.apart.distance / 4)
    assert drawn == [], "it costs nothing where nothing is beyond what is usual"
    rounded = looked.found(looked.elsewhere(), monkeypatch)
    assert rounded.outcome == "equal"
    assert drawn == [0, 1, 2], "it looks three times, and each time with another draw"
    assert rounded.apart is not None
    assert rounded.apart.distance < rounded.apart.held < 1e-2
    assert rounded.apart.share < 0.5
    longer = looked.before[LOCAL] + 1.01 * (looked.mine[LOCAL] - looked.before[LOCAL])
    false = looked.found({**looked.mine, LOCAL: longer}, monkeypatch)
    assert (false.outcome, false.why) == ("differs", "it came to other parameters by these training steps")
    bf16 = replace(RUN, trust=AuditedTrust(numerics="bf16"))
    monkeypatch.setitem(judge.MOMENTS, "bf16", usual.apart.distance / 4)
    other = looked.found(looked.elsewhere(), monkeypatch, bf16)
    assert other.outcome == "differs", "there it is held against what is usual alone"


def test_in_bf16_parameters_are_those_of_their_own_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, bf16 = Looked(tmp_path), replace(RUN, trust=AuditedTrust(numerics="bf16"))
    honest = looked.elsewhere()
    found = looked.found(honest, monkeypatch, bf16, head())
    assert found.outcome == "equal"
    assert found.apart is not None
    assert found.apart.share < 0.1
    slower = {**honest, LOCAL: looked.before[LOCAL] + 0.99 * (honest[LOCAL] - looked.before[LOCAL])}
    assert looked.found(slower, monkeypatch, bf16).outcome == "equal", "by how far they lie apart it is not seen"
    found = looked.found(slower, monkeypatch, bf16, head())
    assert (found.outcome, found.why) == ("differs", NOT_MADE)
    assert found.apart is not None
    assert found.apart.distance == pytest.approx(0.01, rel=0.05)
