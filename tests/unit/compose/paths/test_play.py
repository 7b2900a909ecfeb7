"""All paths by turns: the paper's algorithm, number for number; and what becomes of a path whose peer is killed."""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from unit.compose.paths.tiny import LEVELS, MODEL, begun, texts
from weft.compose.paths.features import features, token_losses
from weft.compose.paths.levels import Levels, LevelsConfig, Module, Path
from weft.compose.paths.modules import Modules
from weft.compose.paths.outer import OuterStepConfig
from weft.compose.paths.play import InnerStepsConfig, Play
from weft.compose.paths.resharding import ReshardingConfig, reassigned
from weft.compose.paths.routing import RoutingConfig
from weft.compose.space import numbers_digest
from weft.errors import CheckpointError, ConfigError, NotFinite
from weft.model.flat import assemble, layout
from weft.model.transformer import Transformer
from weft.rng import stream
from weft.sync.method.schedule import ConstantConfig, CosineConfig, lr

TAU, BATCH, WORDS, SEED = 3, 2, 9, 5
INNER = InnerStepsConfig(
    every=TAU,
    batch_size=BATCH,
    schedule=CosineConfig(lr=1e-2, warmup_tokens=32, total_tokens=400),
    begun_tokens=16,
    clip=0.5,
)
SHARDS = {path: texts(4 + 3 * number, WORDS, seed=number) for number, path in enumerate(LEVELS.paths)}


def play(levels: Levels = LEVELS, inner: InnerStepsConfig = INNER) -> Play:
    shards = {path: SHARDS[LEVELS.paths[number % 4]] for number, path in enumerate(levels.paths)}
    return Play(Modules.of(levels, begun()), inner, OuterStepConfig(), shards, SEED)


def module_of(levels: Levels, name: str, path: Path) -> Module:
    if not name.startswith("layers."):
        return Module(levels.num_levels, 0)
    layer = int(name.split(".")[1])
    level = next(n for n in range(levels.num_levels) if layer in levels.section_of(Module(n, 0)).layers)
    return Module(level, path[level])


def reference(
    levels: Levels, num_rounds: int, shards: dict[Path, NDArray[np.int64]]
) -> dict[tuple[int, int, str], Tensor]:
    """Return all parameters by module and name: 2403.10616, algorithm 1, with torch's AdamW and outer steps in fp64."""
    dense = Transformer(MODEL)
    first = Modules.of(levels, begun()).model(levels.paths[0])
    dense.load_state_dict(first.state_dict())

    theta = {
        (*module_of(levels, name, path), name): p.detach().double()
        for path in levels.paths
        for name, p in dense.named_parameters()
    }
    momentum = {key: torch.zeros_like(p) for key, p in theta.items()}
    models, optimizers = {}, {}
    for path in levels.paths:
        models[path] = Transformer(MODEL)
        matrices = [p for p in models[path].parameters() if p.ndim == 2]
        others = [p for p in models[path].parameters() if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizers[path] = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for t in range(num_rounds):
        deltas: dict[tuple[int, int, str], dict[Path, Tensor]] = {key: {} for key in theta}
        for number, path in enumerate(levels.paths):
            model, optimizer = models[path], optimizers[path]
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(theta[(*module_of(levels, name, path), name)])
            for step in range(t * TAU, (t + 1) * TAU):
                rows = stream(SEED, "paths", "batch", number, step).integers(len(shards[path]), size=BATCH)
                words = torch.from_numpy(shards[path][rows])
                optimizer.zero_grad()
                model.loss(words[:, :-1].contiguous(), words[:, 1:].contiguous()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), INNER.clip)
                for group in optimizer.param_groups:
                    group["lr"] = lr(INNER.schedule, 16 + (step + 1) * BATCH * (WORDS - 1))
                optimizer.step()
            for name, p in model.named_parameters():
                key = (*module_of(levels, name, path), name)
                deltas[key][path] = theta[key] - p.detach().double()
        for key, mine in deltas.items():
            total = sum(len(shards[path]) for path in mine)
            delta = sqrt(len(mine)) * sum(len(shards[path]) / total * each for path, each in mine.items())
            momentum[key] = 0.9 * momentum[key] + delta
            theta[key] = theta[key] - 0.7 * (delta + 0.9 * momentum[key])
    return theta


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("counts", [(2, 2), (1,)])
def test_rounds_are_those_of_the_paper(counts: tuple[int, ...]) -> None:
    """With one path they are those of DiLoCo of one peer."""
    levels = Levels(LevelsConfig(levels=counts), MODEL)
    mine = play(levels)
    for _ in range(3):
        mine.round()
    theta = reference(levels, 3, {path: SHARDS[LEVELS.paths[n]] for n, path in enumerate(levels.paths)})
    for path in levels.paths:
        for name, p in mine.modules.model(path).named_parameters():
            key = (*module_of(levels, name, path), name)
            torch.testing.assert_close(p.double(), theta[key], rtol=2e-3, atol=2e-4)


def test_a_path_that_is_killed_leaves_the_others_as_if_it_were_not_there() -> None:
    killed, mine = (0, 1), play()
    losses = mine.round(without={killed})
    assert set(losses) == set(LEVELS.paths) - {killed}
    for only, module in (((0, 0), Module(0, 0)), ((1, 1), Module(1, 1))):  # the other path of each is the killed one
        alone = play()
        alone.round(without=set(LEVELS.paths) - {only})
        assert torch.equal(mine.modules.vectors[module], alone.modules.vectors[module])


def test_modules_that_nobody_brings_anything_for_stay() -> None:
    mine, before = play(), Modules.of(LEVELS, begun())
    mine.round(without={(0, 1), (1, 1)})
    assert torch.equal(mine.modules.vectors[Module(1, 1)], before.vectors[Module(1, 1)])
    assert not torch.equal(mine.modules.vectors[Module(1, 0)], before.vectors[Module(1, 0)])


def test_who_takes_over_a_path_has_its_modules_and_no_moments() -> None:
    mine, path = play(), (1, 0)
    for _ in range(2):
        mine.round()
    mine.round(without={path})
    assert set(mine._moments) == set(LEVELS.paths) - {path}
    fresh = Play(mine.modules.copy(), INNER, OuterStepConfig(), SHARDS, SEED)
    fresh.num_rounds = mine.num_rounds
    taken, _ = mine._train(path, SHARDS[path])
    begun_anew, _ = fresh._train(path, SHARDS[path])
    assert torch.equal(taken, begun_anew)
    kept, _ = mine._train((0, 0), SHARDS[(0, 0)])
    lost, _ = fresh._train((0, 0), SHARDS[(0, 0)])
    assert not torch.equal(kept, lost)
    assert mine._moments[path][1] == TAU  # of AdamW's count it begins with none, too


@pytest.mark.usefixtures("shapes_unchecked")
def test_it_goes_on_from_a_state_as_it_would_have() -> None:
    one, other = play(), play()
    one.round()
    one.round(without={(0, 1)})
    other.load(one.state())
    for _ in range(2):
        one.round()
        other.round()
    assert all(torch.equal(vector, other.state()[name]) for name, vector in one.state().items())


def test_a_state_that_is_not_whole_changes_nothing() -> None:
    one, other = play(), play()
    one.round()
    before = other.state()
    for name in ("rounds", "vector.1.0", "momentum.2.0", "moment2.3"):
        with pytest.raises(CheckpointError, match="incomplete, or belongs to other levels"):
            other.load({each: vector for each, vector in one.state().items() if each != name})
    with pytest.raises(CheckpointError):
        other.load(play(Levels(LevelsConfig(levels=(2,)), MODEL)).state())
    assert all(torch.equal(vector, other.state()[name]) for name, vector in before.items())


@pytest.mark.usefixtures("shapes_unchecked")
def test_paths_learn() -> None:
    inner = InnerStepsConfig(every=10, batch_size=8, schedule=ConstantConfig(lr=1e-2))
    shards = {path: texts(40, WORDS)[number // 2 :: 2] for number, path in enumerate(LEVELS.paths)}
    mine = Play(Modules.of(LEVELS, begun()), inner, OuterStepConfig(rescale="none"), shards, SEED)
    first = mine.round()
    for _ in range(3):
        last = mine.round()
    assert all(last[path] < 0.7 * first[path] for path in LEVELS.paths), (first, last)


@pytest.mark.usefixtures("shapes_unchecked")
def test_paths_and_shards_sort_out_what_was_mixed() -> None:
    """Two turns of training and of assigning anew: texts of two kinds, three quarters of one in each shard."""
    levels, marked = Levels(LevelsConfig(levels=(2,)), MODEL), begun().clone()
    embed = next(span for span in layout(MODEL) if span.name == "embed.weight")
    marked[embed.offset : embed.stop].view(embed.shape)[14:, 0] += 0.1  # features tell the kinds apart
    windows = texts(160, WORDS)
    apart, rest = windows[:40], windows[40:]
    kinds = np.arange(len(rest)) % 2
    is_strange = np.arange(len(rest)) // 2 % 4 == 0
    found = [np.flatnonzero((kinds == path) != is_strange) for path in (0, 1)]
    inner = InnerStepsConfig(every=4, batch_size=8, schedule=ConstantConfig(lr=1e-2))
    paths = Play(Modules.of(levels, marked), inner, OuterStepConfig(rescale="none"), dealt(levels, rest, found), SEED)
    dense, shares = assemble(MODEL, marked), [0.75]
    for _ in range(2):
        for _ in range(2):
            paths.round()
        losses = [token_losses(paths.modules.model(path), apart).mean(1) for path in levels.paths]
        learnt = features(dense, list(apart[:, :6])), np.stack(losses, axis=1)
        z = features(dense, list(rest[:, :6]))
        _, found = reassigned(ReshardingConfig(), RoutingConfig(), levels, learnt, z, numbers_digest(marked))
        paths.set_shards(dealt(levels, rest, found))
        shares.append(float(np.mean([(kinds[mine] == path).mean() for path, mine in enumerate(found)])))
    assert shares[-1] > 0.95, (shares, [[each[kind::2].mean() for kind in (0, 1)] for each in losses])


def dealt(
    levels: Levels, windows: NDArray[np.int64], mine: Sequence[NDArray[np.int64]]
) -> dict[Path, NDArray[np.int64]]:
    return {path: windows[documents] for path, documents in zip(levels.paths, mine, strict=True)}


def test_a_path_with_nothing_to_train_on_is_refused() -> None:
    mine = play()
    with pytest.raises(ConfigError, match=r"the paths \(0, 1\) have no documents"):
        mine.set_shards({**SHARDS, (0, 1): SHARDS[(0, 1)][:0]})
    with pytest.raises(ConfigError, match="no documents"):
        mine.set_shards({path: windows for path, windows in SHARDS.items() if path != (1, 1)})


def test_training_that_diverges_says_so() -> None:
    mine = play()
    mine.modules.vectors[Module(1, 0)].fill_(float("nan"))
    with pytest.raises(NotFinite, match="step 1: the loss is nan"):
        mine.round()
