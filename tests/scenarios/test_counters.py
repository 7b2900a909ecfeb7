"""Runs that take out of the model again what a member had brought into it that was struck out for false work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scenarios.cheats import Noise
from scenarios.test_audits import ALWAYS, of_merging, play, struck_out
from scenarios.test_faults import MakeSwarm
from weft.codec.config import Fp32Config
from weft.events import WorkStays, WorkTakenOut
from weft.ids import Round
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.sync.method.choices import Choices, NesterovConfig, SgdConfig
from weft.sync.records.messages import Manifest

FALSE = Round(4)  # the round that d lies in
PLAIN = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0), codec=Fp32Config())
NESTEROV = Choices(every=2, send="delta", apply=NesterovConfig(lr=0.7, momentum=0.3), codec=Fp32Config())
Models = dict[Round, Tensor]  # the outer parameters after each round


class Played:
    """A run in which d brings a multiple of its delta to one round, while nobody's steps hang on the parameters."""

    def __init__(
        self,
        make_swarm: MakeSwarm,
        monkeypatch: pytest.MonkeyPatch,
        method: Choices,
        times: float,
        num_rounds: int = 20,
    ) -> None:
        self.swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=num_rounds, num_peers=4, learns=True)
        self.swarm.make_trainer = Noise
        self.models: Models = {}
        self._lie(monkeypatch, times)
        self._watch(monkeypatch)

    def _lie(self, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
        encode = Carry.encode

        def false(carry: Carry, *given: Any, **named: Any) -> Any:
            head = carry._replica.head
            is_false = carry is self.swarm.member("d").life.peer._carry and head is not None
            if not (is_false and head.round + 1 == FALSE and carry.tokens):
                return encode(carry, *given, **named)
            trainer, outer = carry._trainer, carry._replica.outer
            honest = trainer.local().clone()
            trainer.set_local(outer - times * (outer - honest))
            payload = encode(carry, *given, **named)
            trainer.set_local(honest)
            return payload

        monkeypatch.setattr(Carry, "encode", false)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        apply = Replica.apply

        def noted(replica: Replica, manifest: Manifest, results: Any) -> None:
            apply(replica, manifest, results)
            known = self.models.setdefault(manifest.round, replica.outer.clone())
            assert torch.equal(known, replica.outer)  # on all members

        monkeypatch.setattr(Replica, "apply", noted)

    @property
    def countered_in(self) -> list[Round]:
        return sorted({manifest.round for manifest in self.swarm.chains.values() if manifest.counters})

    def play(self) -> "Played":
        play(self.swarm, r"done again what it says it has done|refuse this key")
        assert struck_out(self.swarm) == "its payload is not what its training steps came to"
        assert of_merging(self.swarm) == []
        return self


@pytest.fixture
def make_played(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Played]:
    def make(method: Choices, times: float, **given: Any) -> Played:
        with monkeypatch.context() as patch:
            played = Played(make_swarm, patch, method, times, **given)
            return played.play()

    return make


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / other.double().norm())


def test_plain(make_played) -> None:
    false = make_played(PLAIN, 30.0)
    print(false.countered_in, {r: v.norm() for r, v in false.models.items()})
    from weft.sync.governance import findings_in

    print(
        [(m.round, [f.weighed for w in m.acts for f in findings_in(w)]) for m in false.swarm.chains.values() if m.acts]
    )
    print(false.swarm.lives[0].peer.replica.charter.false_works)
    print([e for l in false.swarm.lives for e in l.seen(WorkStays)])
    none = make_played(PLAIN, 0.0)
    print(none.countered_in, {r: apart(v, none.models[r]) for r, v in false.models.items()})
    print([e for l in false.swarm.lives for e in l.seen(WorkTakenOut)])
    assert 0
