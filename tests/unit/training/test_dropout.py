"""What an adapter leaves out in a step follows from the run and the sample; in evaluations all is there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unit.training.test_rewarded import LENGTH, TRAIN, made, trainer, write_base
from weft.data.batch import Batches
from weft.errors import ConfigError
from weft.events import Event, FellBack
from weft.run.genesis import Sealed
from weft.training.trainer import Trainer

TEXT = {"source": {"type": "text", "paths": ["text.txt"]}, "heldout_fraction": 0.2}


def sealed(base: Path, dropout: float | None, **changes: Any) -> Sealed:
    if not (base / "model").exists():
        write_base(base)
    words = "".join(f"{number} is {number % 7} and {number % 11}. " for number in range(2000))
    (base / "text.txt").write_text(words)
    adapter = {"type": "lora", "rank": 4} | ({} if dropout is None else {"dropout": dropout})
    given = {"data": TEXT, "reward": None, "adapter": adapter, "method": {"type": "ddp"}}
    return made(base, **(given | changes))


def learner(base: Path, of: Sealed, told: list[Event], **settings: Any) -> tuple[Trainer, torch.Tensor]:
    """Return one whose adapter has learnt something: B is not zero."""
    found, outer = trainer(base, of, told, **settings)
    outer.copy_(torch.randn(outer.numel(), generator=torch.Generator().manual_seed(2)) / 5)
    found.set_local(outer)
    return found, outer


def test_a_step_is_the_same_however_it_is_batched(tmp_path: Path) -> None:
    of = sealed(tmp_path, 0.3)
    places, others = np.array([3, 14, 15, 9]), np.array([3, 14, 15, 10])
    found = list[torch.Tensor]()
    for settings in ({"micro_batch": 4}, {"micro_batch": 1}, {"micro_batch": 3, "has_recompute": True}):
        one, _ = learner(tmp_path, of, [], **settings)
        found.append(one.gradient(places, 0, 1)[0].clone())
        torch.testing.assert_close(one.gradient(places, 0, 1)[0], found[-1])
        assert not torch.allclose(one.gradient(others, 0, 1)[0], found[-1], rtol=1e-2)
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-3, atol=1e-6)
    whole, _ = learner(tmp_path, sealed(tmp_path, None), [])
    assert not torch.allclose(whole.gradient(places, 0, 1)[0], found[0], rtol=1e-2)


def test_an_evaluation_reads_all(tmp_path: Path) -> None:
    losses = []
    for dropout in (0.3, None):
        of = sealed(tmp_path, dropout)
        one, outer = learner(tmp_path, of, [])
        one.warm_up()
        losses.append(one.evaluate(outer, Batches(of.store, of.index, "heldout", LENGTH, 0), 8).loss)
    assert losses[0] == losses[1]


def test_it_is_not_compiled_and_says_so(tmp_path: Path) -> None:
    told = list[Event]()
    learner(tmp_path, sealed(tmp_path, 0.3), told, is_compiled=True)
    assert [(each.wanted, each.reason) for each in told if isinstance(each, FellBack)] == [
        ("torch.compile", "the adapter has dropout")
    ]


def test_answers_are_compared_with_all_of_the_model(tmp_path: Path) -> None:
    adapter = {"type": "lora", "rank": 4, "dropout": 0.1}
    with pytest.raises(ConfigError, match=r"adapter\.dropout: answers are compared"):
        made(write_base(tmp_path), adapter=adapter)
    pairs = {"source": {"type": "preferences", "paths": ["pairs.jsonl"]}}
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}", "chosen": "a", "rejected": "b"}) + "\n" for n in range(40))
    )
    changes = {"data": pairs, "reward": None, "train": TRAIN | {"loss": {"type": "dpo"}}}
    with pytest.raises(ConfigError, match=r"adapter\.dropout: pairs of answers are compared"):
        made(tmp_path, adapter=adapter, **changes)
