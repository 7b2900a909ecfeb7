"""All paths of a run on one machine, by turns: what peers would do, without what it costs to talk.

    of each path:      copy its modules ──► tau inner steps on its shard ──► deltas of its modules
    of each module:    deltas of the paths that contain it ──► outer step

A path has nothing of its own but its inner optimizer's moments. So one whose peer is killed is taken over by any other:
it begins with the modules as they are, and its moments with zero.

DiPaCo: Douillard et al., 2403.10616, algorithm 1.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Annotated

import msgspec
import numpy as np
import torch
from jaxtyping import Float32, Int64

from weft.compose.paths.levels import Module, Path
from weft.compose.paths.modules import Modules
from weft.compose.paths.outer import OuterStepConfig, merged, step
from weft.config import Config
from weft.errors import CheckpointError, ConfigError, NotFinite
from weft.model.flat import FlatModel, over
from weft.model.transformer import Transformer
from weft.rng import stream
from weft.sync.method.choices import AdamWConfig
from weft.sync.method.schedule import ScheduleConfig, lr
from weft.training.optimizer import InnerOptimizer, State, build

Windows = Int64[np.ndarray, "windows words"]  # each with the word that follows its last token


class InnerStepsConfig(Config, frozen=True, kw_only=True):
    """How a path is trained between two outer steps."""

    every: Annotated[int, msgspec.Meta(ge=1, le=100_000, description="training steps of a round: tau")] = 150
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=100_000, description="windows of a step")] = 8
    schedule: ScheduleConfig
    """By the tokens of one path, those of the model that all began as among them."""
    begun_tokens: Annotated[int, msgspec.Meta(ge=0, description="that this model was trained on")] = 0
    optimizer: AdamWConfig = AdamWConfig()
    clip: Annotated[float, msgspec.Meta(gt=0, le=1e6, description="norm of a gradient, at most")] = 1.0


class Steps:
    """Inner steps of one model, which several train by turns.

    Args:
        model: whose vector is changed.
    """

    def __init__(self, config: InnerStepsConfig, model: FlatModel) -> None:
        self._config = config
        self.model = model
        self.optimizer: InnerOptimizer = build(config.optimizer, model)

    def make(self, windows: Windows, num: int, draw: Callable[[int], np.random.Generator], first: int = 0) -> float:
        """Make `num` steps; return their mean loss, nats per token.

        Args:
            windows: from which each step draws its batch.
            draw: returns the generator of a step.
            first: number of the first step, from 0: the schedule goes by it.

        Raises:
            NotFinite: a loss or a gradient is NaN or infinite; the parameters are those before that step.
        """
        config, model, losses = self._config, self.model, list[float]()
        num_tokens = config.batch_size * (windows.shape[1] - 1)
        for number in range(first, first + num):
            rows = draw(number).integers(len(windows), size=config.batch_size)
            words = torch.from_numpy(windows[rows].astype(np.int64)).to(model.vector.device)
            model.zero_gradient()
            loss = model.module.loss(words[:, :-1].contiguous(), words[:, 1:].contiguous())
            loss.backward()  # type: ignore[no-untyped-call]
            norm = float(torch.linalg.vector_norm(model.gradient))
            losses.append(float(loss.detach()))
            if not (math.isfinite(losses[-1]) and math.isfinite(norm)):
                raise NotFinite(
                    f"step {number + 1}: the loss is {losses[-1]}, the gradient's norm {norm}. Lower the inner or the "
                    "outer learning rate, or lengthen the warm-up."
                )
            if norm > config.clip:
                model.gradient.mul_(config.clip / norm)
            self.optimizer.step(lr(config.schedule, config.begun_tokens + (number + 1) * num_tokens))
        return sum(losses) / len(losses)


class Play:
    """
    Args:
        modules: changed in place.
        shards: windows of each path's documents.
        seed: of which window is drawn when.
        device: where paths are trained, one after the other; modules stay on the CPU.

    Raises:
        ConfigError: a path has no windows.
    """

    def __init__(
        self,
        modules: Modules,
        inner: InnerStepsConfig,
        outer: OuterStepConfig,
        shards: Mapping[Path, Windows],
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        self.modules = modules
        self.num_rounds = 0
        self._inner = inner
        self._outer = outer
        self._seed = seed
        self._device = device or torch.device("cpu")
        self._momenta = {module: torch.zeros_like(vector) for module, vector in modules.vectors.items()}
        self._moments: dict[Path, tuple[State, int]] = {}  # of each path, and how many steps they have seen
        self._steps = Steps(inner, _model(modules, self._device))
        self._shards = dict[Path, Windows]()
        self.set_shards(shards)

    def set_shards(self, shards: Mapping[Path, Windows]) -> None:
        """Train on other shards from now on.

        Raises:
            ConfigError: a path has no windows.
        """
        empty = [path for path in self.modules.levels.paths if path not in shards or not len(shards[path])]
        if empty:
            raise ConfigError(
                f"shards: the paths {', '.join(map(str, empty))} have no documents, and would starve. Set the least "
                "share of each path above 0, or give more documents."
            )
        self._shards = {path: shards[path] for path in self.modules.levels.paths}

    def round(self, without: Collection[Path] = ()) -> dict[Path, float]:
        """Train all paths, and step with what they came to; return the mean training loss of each.

        Args:
            without: paths whose peers are killed meanwhile: nothing of theirs comes, and whoever trains them next has
                their modules alone.

        Raises:
            NotFinite: as `Steps.make`.
        """
        deltas: dict[Module, dict[Path, Float32[torch.Tensor, " num"]]] = {}
        losses = dict[Path, float]()
        for path, windows in self._shards.items():
            if path in without:
                self._moments.pop(path, None)
                continue
            local, losses[path] = self._train(path, windows)
            for module, part in self.modules.parts(path, local).items():
                deltas.setdefault(module, {})[path] = self.modules.vectors[module] - part
        sizes = {path: len(windows) for path, windows in self._shards.items()}
        for module, mine in deltas.items():
            delta = merged(self._outer, mine, sizes)
            step(self._outer, self.modules.vectors[module], self._momenta[module], delta)
        self.num_rounds += 1
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that the rounds to come depend on: copies, by name. Shards are not among it."""
        found = {"rounds": torch.tensor([self.num_rounds])}
        for module, vector in self.modules.vectors.items():
            found[f"vector.{module.level}.{module.number}"] = vector.clone()
            found[f"momentum.{module.level}.{module.number}"] = self._momenta[module].clone()
        for path, (moments, num_steps) in self._moments.items():
            number = self.modules.levels.number_of(path)
            found[f"steps.{number}"] = torch.tensor([num_steps])
            found |= {f"{name}.{number}": moment.clone() for name, moment in moments.items()}
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` returned, by copying.

        Raises:
            CheckpointError: it belongs to other levels, or is incomplete; nothing is changed.
        """
        names = list(self._steps.optimizer.state())
        pairs = [
            (to, state.get(f"{kind}.{module.level}.{module.number}"))
            for kind, vectors in (("vector", self.modules.vectors), ("momentum", self._momenta))
            for module, to in vectors.items()
        ]
        numbers = {path: number for number, path in enumerate(self.modules.levels.paths) if f"steps.{number}" in state}
        is_whole = all(f"{name}.{number}" in state for number in numbers.values() for name in names)
        if "rounds" not in state or not is_whole or any(x is None or x.numel() != to.numel() for to, x in pairs):
            raise CheckpointError(
                "the state of the paths is incomplete, or belongs to other levels or another model. Go back to an "
                "earlier one, or begin anew."
            )
        self.num_rounds = int(state["rounds"])
        for to, found in pairs:
            assert found is not None
            to.copy_(found)
        self._moments = {
            path: ({name: state[f"{name}.{number}"].clone() for name in names}, int(state[f"steps.{number}"]))
            for path, number in numbers.items()
        }

    def _train(self, path: Path, windows: Windows) -> tuple[Float32[torch.Tensor, " num"], float]:
        steps, number = self._steps, self.modules.levels.number_of(path)
        steps.model.vector.copy_(self.modules.vector(path))
        state, num_steps = self._moments.get(path, ({}, 0))
        if state:
            steps.optimizer.load(state, num_steps)
        else:
            zeros = {name: torch.zeros_like(moment) for name, moment in steps.optimizer.state().items()}
            steps.optimizer.load(zeros, 0)
        loss = steps.make(
            windows,
            self._inner.every,
            lambda at: stream(self._seed, "paths", "batch", number, at),
            first=self.num_rounds * self._inner.every,
        )
        kept = {name: moment.clone() for name, moment in steps.optimizer.state().items()}
        self._moments[path] = (kept, num_steps + self._inner.every)
        return steps.model.vector.cpu().clone(), loss


def _model(modules: Modules, device: torch.device) -> FlatModel:
    """Return the model in which paths are trained by turns."""
    with torch.device("meta"):
        model = Transformer(modules.levels.model)
    return over(model, torch.zeros(modules.levels.num_path_parameters, device=device))
