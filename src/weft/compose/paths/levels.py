"""Levels of modules, and the paths through them.

    tokens ──► embedding ──► level 0: one of K_0 ──► level 1: one of K_1 ──► norm, head ──► logits

A model's layers are cut into levels, and of each level there are several modules, all of one shape. A path takes one of
each: (0, 2) goes through the first of level 0 and the third of level 1. It is a whole model. Embedding, last norm and
head, the ends, are a level after the others: of one module that all paths share, or of one for each path.

A module is a section of the model and has a flat vector of its own (`weft.model.flat.layout`). All here is a function
of two configs: every peer has the same modules and paths, in the same order.

DiPaCo: Douillard et al., 2403.10616, section 2.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from weft.config import Config
from weft.errors import ConfigError
from weft.ids import several
from weft.model.config import ModelConfig, num_parameters
from weft.model.sections import Section, num_section_parameters

Path = tuple[int, ...]  # of each level the number of a module

# The paper has 256. Every path is scored for every document where documents are assigned anew.
MAX_PATHS = 4096
MAX_LEVELS = 64

_ENDS = Section(0, 1, range(0), has_table=True)


class Module(NamedTuple):
    """The ends have the level after the last."""

    level: int
    number: int


class LevelsConfig(Config, frozen=True, kw_only=True):
    """How a model is cut, and how many modules there are of each piece.

    Raises:
        ConfigError: no levels, levels of no modules, or too many paths.
    """

    levels: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_PATHS)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_LEVELS, description="modules of each level, from tokens to logits"),
    ] = (2, 2)
    ends: Annotated[
        Literal["shared", "path"], msgspec.Meta(description="whether all paths share embedding, last norm and head")
    ] = "shared"

    def __post_init__(self) -> None:
        # A program or a command line wrote it: files are checked as they are read.
        if not 1 <= len(self.levels) <= MAX_LEVELS:
            raise ConfigError(f"levels: {len(self.levels)} of them. Allowed: 1 to {MAX_LEVELS}.")
        if wrong := [num for num in self.levels if not 1 <= num <= MAX_PATHS]:
            raise ConfigError(
                f"levels: a level of {wrong[0]:,} modules. Allowed: 1 to {MAX_PATHS:,}, such as 2,2 for 4 paths."
            )
        if prod(self.levels) > MAX_PATHS:
            raise ConfigError(
                f"levels: {' x '.join(map(str, self.levels))} modules make {prod(self.levels):,} paths. Allowed: at "
                f"most {MAX_PATHS:,}. Take fewer modules in a level, or fewer levels."
            )


@dataclass(frozen=True)
class Levels:
    """
    Args:
        config: how it is cut.
        model: what each path is.

    Raises:
        ConfigError: more levels than layers, or a model with an adapter.
    """

    config: LevelsConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        if self.num_levels > self.model.num_layers:
            raise ConfigError(
                f"levels: {several(self.num_levels, 'level')} of a model of {several(self.model.num_layers, 'layer')}. "
                "Each level has one layer or more: take fewer levels, or a deeper model."
            )
        if self.model.adapter is not UNSET:
            raise ConfigError("levels: modules are trained whole. Leave out model.adapter.")

    # --- modules and paths ---

    @property
    def num_levels(self) -> int:
        return len(self.config.levels)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """All paths, in ascending order: (0, 0), (0, 1), ..."""
        return tuple(itertools.product(*map(range, self.config.levels)))

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """All modules, level by level; the ends last."""
        num_ends = 1 if self.config.ends == "shared" else len(self.paths)
        counts = (*self.config.levels, num_ends)
        return tuple(Module(level, number) for level, num in enumerate(counts) for number in range(num))

    def number_of(self, path: Path) -> int:
        """Return the place of a path among all.

        Raises:
            ConfigError: there is no such path.
        """
        number = self._numbers.get(path)
        if number is None:
            last = tuple(num - 1 for num in self.config.levels)
            raise ConfigError(f"path {path}: there is none. Paths are {self.paths[0]} to {last}.")
        return number

    def modules_of(self, path: Path) -> tuple[Module, ...]:
        """Return what a path is made of, level by level; the ends last."""
        ends = 0 if self.config.ends == "shared" else self.number_of(path)
        return *(Module(level, number) for level, number in enumerate(path)), Module(self.num_levels, ends)

    def paths_of(self, module: Module) -> tuple[Path, ...]:
        """Return the paths that contain a module."""
        return tuple(path for path in self.paths if module in self.modules_of(path))

    def section_of(self, module: Module) -> Section:
        """Return what a module has of the model.

        A level takes the residual stream and returns it, as a section in the middle does.
        """
        if module.level == self.num_levels:
            return _ENDS
        even, more = divmod(self.model.num_layers, self.num_levels)  # the first levels have one more
        starts = [level * even + min(level, more) for level in (module.level, module.level + 1)]
        return Section(1, 3, range(*starts))

    # --- how much that is ---

    def num_parameters(self, module: Module) -> int:
        return num_section_parameters(self.model, self.section_of(module))

    @property
    def num_path_parameters(self) -> int:
        """What computes a token: one path."""
        return num_parameters(self.model)

    @cached_property
    def num_all_parameters(self) -> int:
        """What is trained: all modules."""
        return sum(map(self.num_parameters, self.modules))

    def num_sharing(self, module: Module) -> int:
        """Return how many paths contain a module: P_l in the paper."""
        if module.level == self.num_levels:
            return len(self.paths) if self.config.ends == "shared" else 1
        return len(self.paths) // self.config.levels[module.level]

    def round_nbytes(self, path: Path, nbytes: float = 4.0) -> int:
        """Return the bytes that a path's peer sends in a round, and receives again as many.

        Of P paths that share a module each merges a P-th: it sends the other parts of its delta, and its merged part to
        the others. A module of one path stays where it is.

        Args:
            nbytes: of a number as it is sent.
        """
        sent = 0.0
        for module in self.modules_of(path):
            num_sharing = self.num_sharing(module)
            sent += 2 * (num_sharing - 1) / num_sharing * self.num_parameters(module) * nbytes
        return round(sent)

    @cached_property
    def _numbers(self) -> dict[Path, int]:
        return {path: number for number, path in enumerate(self.paths)}
