"""Modules: paths that begin as one model, share memory, and come apart as they were put together."""

import pytest
import torch

from unit.compose.paths.tiny import LEVELS, MODEL, begun, texts
from weft.compose.paths.levels import Levels, LevelsConfig, Module
from weft.compose.paths.modules import Modules
from weft.errors import ConfigError
from weft.model.flat import assemble, layout


@pytest.mark.parametrize("ends", ["shared", "path"])
def test_every_path_begins_as_the_dense_model_bit_for_bit(ends: str) -> None:
    levels = Levels(LevelsConfig(levels=(3, 1, 2), ends=ends), MODEL)  # type: ignore[arg-type]
    modules, tokens = Modules.of(levels, begun()), torch.from_numpy(texts(4, 9))
    dense = assemble(MODEL, begun())(tokens)
    for path in levels.paths:
        assert torch.equal(modules.vector(path), begun())
        assert torch.equal(modules.model(path)(tokens), dense)


def test_a_module_is_the_same_memory_in_all_its_paths() -> None:
    modules, tokens = Modules.of(LEVELS, begun()), torch.from_numpy(texts(2, 9))
    models = {path: modules.model(path) for path in LEVELS.paths}
    before = {path: model(tokens) for path, model in models.items()}
    modules.vectors[Module(1, 0)].mul_(2)
    changed = {path for path, model in models.items() if not torch.equal(model(tokens), before[path])}
    assert changed == set(LEVELS.paths_of(Module(1, 0)))


def test_what_is_put_together_comes_apart_again() -> None:
    vectors = {
        module: torch.full((LEVELS.num_parameters(module),), float(number))
        for number, module in enumerate(LEVELS.modules)
    }
    modules = Modules(LEVELS, vectors)
    for path in LEVELS.paths:
        parts = modules.parts(path, modules.vector(path))
        assert set(parts) == set(LEVELS.modules_of(path))
        assert all(torch.equal(part, vectors[module]) for module, part in parts.items())
    whole, spans = modules.vector((1, 0)), layout(MODEL)
    numbers = {span.name: set(whole[span.offset : span.stop].tolist()) for span in spans}
    assert numbers["embed.weight"] == numbers["norm.weight"] == numbers["head.weight"] == {4.0}
    assert numbers["layers.0.ffn.down.weight"] == numbers["layers.1.ffn_norm.weight"] == {1.0}
    assert numbers["layers.2.attention.qkv.weight"] == {2.0}


def test_a_copy_is_nobody_elses() -> None:
    modules = Modules.of(LEVELS, begun())
    modules.copy().vectors[Module(0, 0)].zero_()
    assert torch.equal(modules.vector((0, 0)), begun())


def test_modules_of_other_levels_are_refused() -> None:
    vectors = Modules.of(LEVELS, begun()).vectors
    with pytest.raises(ConfigError, match=r"module 0 of level 2 has .* parameters, its vector 0"):
        Modules(LEVELS, {module: vector for module, vector in vectors.items() if module.level < 2})
    with pytest.raises(ConfigError, match="belongs to other levels"):
        Modules(Levels(LevelsConfig(levels=(2,)), MODEL), vectors)
