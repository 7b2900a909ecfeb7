"""Levels: the same modules and paths for all, which together are the model, and what they cost."""

from math import prod

import msgspec
import pytest

from unit.compose.paths.tiny import LEVELS, MODEL
from weft.compose.paths.levels import MAX_PATHS, Levels, LevelsConfig, Module
from weft.config import from_tree
from weft.errors import ConfigError
from weft.model.config import AdapterConfig
from weft.model.flat import layout

SHAPES = [((2, 2), "shared"), ((3, 1, 2), "path"), ((4,), "shared"), ((1,), "path")]


def levels(counts: tuple[int, ...], ends: str, **fields: object) -> Levels:
    model = msgspec.structs.replace(MODEL, **fields)
    return Levels(msgspec.convert({"levels": counts, "ends": ends}, LevelsConfig), model)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("counts", "ends"), SHAPES)
def test_modules_of_every_path_are_the_model_each_tensor_once(
    counts: tuple[int, ...], ends: str, is_tied: bool
) -> None:
    mine = levels(counts, ends, is_tied=is_tied, num_layers=5)
    whole = sorted((span.name, span.shape) for span in layout(mine.model))
    assert len(mine.paths) == prod(counts)
    for path in mine.paths:
        spans = [span for module in mine.modules_of(path) for span in layout(mine.model, mine.section_of(module))]
        assert sorted((span.name, span.shape) for span in spans) == whole


@pytest.mark.parametrize(("counts", "ends"), SHAPES)
def test_figures_are_those_of_the_vectors(counts: tuple[int, ...], ends: str) -> None:
    mine = levels(counts, ends, num_layers=5)
    sizes = {module: layout(mine.model, mine.section_of(module)).num_parameters for module in mine.modules}
    assert {module: mine.num_parameters(module) for module in mine.modules} == sizes
    assert mine.num_path_parameters == layout(mine.model).num_parameters
    assert mine.num_all_parameters == sum(sizes.values())
    assert [mine.num_sharing(module) for module in mine.modules] == [len(mine.paths_of(m)) for m in mine.modules]
    assert all(mine.modules_of(path)[-1] in mine.modules for path in mine.paths)


def test_paths_and_modules_have_one_order() -> None:
    assert LEVELS.paths == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert LEVELS.modules == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    assert LEVELS.modules_of((1, 0)) == (Module(0, 1), Module(1, 0), Module(2, 0))
    assert LEVELS.paths_of(Module(1, 0)) == ((0, 0), (1, 0))
    own = levels((2, 2), "path")
    assert own.modules_of((1, 0))[-1] == Module(2, 2)
    assert own.paths_of(Module(2, 2)) == ((1, 0),)


def test_layers_are_cut_evenly_the_first_levels_having_one_more() -> None:
    mine = levels((1, 2, 3), "shared", num_layers=8)
    cuts = [mine.section_of(Module(level, 0)).layers for level in range(3)]
    assert cuts == [range(3), range(3, 6), range(6, 8)]


def sent_by(mine: Levels, path: tuple[int, ...], nbytes: int) -> int:
    """Return what the peer of a path sends, part by part: each of P members merges one of P parts."""
    total = 0
    for module in mine.modules_of(path):
        members = mine.paths_of(module)
        part = mine.num_parameters(module) * nbytes / len(members)
        others = [member for member in members if member != path]
        total += sum(part for _ in others)  # its delta, to whoever merges
        total += sum(part for _ in others)  # what it has merged
    return round(total)


@pytest.mark.parametrize(("counts", "ends"), SHAPES)
def test_bytes_of_a_round_are_those_of_parts_that_go_to_and_fro(counts: tuple[int, ...], ends: str) -> None:
    mine = levels(counts, ends, num_layers=5)
    assert [mine.round_nbytes(path) for path in mine.paths] == [sent_by(mine, path, 4) for path in mine.paths]
    assert mine.round_nbytes(mine.paths[0], 1.0) == sent_by(mine, mine.paths[0], 1)


def test_modules_of_one_path_are_not_sent() -> None:
    assert levels((4,), "path").round_nbytes((2,)) == 0


def test_what_cannot_be_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="4 levels of a model of 3 layers"):
        levels((1, 1, 1, 1), "shared")
    with pytest.raises(ConfigError, match=r"modules are trained whole"):
        Levels(LEVELS.config, msgspec.structs.replace(MODEL, adapter=AdapterConfig(rank=2)))
    with pytest.raises(
        ConfigError, match=rf"levels: 128 x 128 modules make 16,384 paths. Allowed: at most {MAX_PATHS:,}"
    ):
        from_tree({"levels": [128, 128]}, LevelsConfig, where="a file")
    with pytest.raises(ConfigError, match="levels"):
        from_tree({"levels": []}, LevelsConfig, where="a file")
    with pytest.raises(ConfigError, match=r"path \(2, 0\): there is none. Paths are \(0, 0\) to \(1, 1\)"):
        LEVELS.number_of((2, 0))
