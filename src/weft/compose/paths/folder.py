"""What all who train paths have: how the model is cut, who reads what, and how long they train.

    talk/ seed/                        the model that all paths begin as, and whose features route documents: a member
          router.bin                   which path a document takes, by its first tokens
          path-0.1.jsonl               documents of a path; path-0.1.heldout.jsonl: what nobody trains on
          paths.json                   levels, steps, rounds
          trained/0.1/                 a path, once it is trained: a Hugging Face folder

A module is synchronised by a run of its own among the paths that contain it. Its name, weights and outer rate follow
from this folder, so all who have it agree.

DiPaCo: Douillard et al., 2403.10616.
"""

import json
import re
from pathlib import Path as Folder
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.compose.paths.levels import Levels, LevelsConfig, Module, Path
from weft.compose.paths.outer import OuterStepConfig, nesterov
from weft.compose.paths.routing import PREFIX, Router
from weft.config import Config, from_tree
from weft.cost.training import flops_per_token
from weft.errors import ConfigError, WireError
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.run.config import SyncConfig
from weft.sync.method.presets import DiLoCoConfig
from weft.training.device import decoder

FORMAT = 1
RECORD, ROUTER, SEED, TRAINED = "paths.json", "router.bin", "seed", "trained"
WHOLE = 1000  # samples that a step of the largest shard counts as: others' steps count by their documents
LEAST_SEQ_LEN = PREFIX + 2  # of a sample: some of it is scored
MAX_NBYTES = 1 << 20

_Hex = Annotated[Digest, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_NAME = r"\A\w[\w.-]{0,39}\Z"  # a module's run is called so, with two numbers more


class SharedPaths(Config, frozen=True, kw_only=True):
    """
    Args:
        model: what each path is.
        seed_model: digest of the vector that all begin as.
        steps: of a path in a round: tau.
        documents: of each path's shard, in the order of `Levels.paths`.
        lr: peak learning rate of a path's own steps.

    Raises:
        ConfigError: documents of other paths.
    """

    format: int = FORMAT
    name: Annotated[str, Meta(pattern=_NAME)]
    levels: LevelsConfig
    model: ModelConfig
    tokenizer: _Hex
    seed_model: _Hex
    router: _Hex
    steps: Annotated[int, Meta(ge=1, le=100_000)]
    rounds: Annotated[int, Meta(ge=1, le=10**6)]
    batch_size: Annotated[int, Meta(ge=1, le=100_000)]
    seq_len: Annotated[int, Meta(ge=2)]
    lr: Annotated[float, Meta(gt=0, le=10)]
    outer: OuterStepConfig = OuterStepConfig()
    documents: tuple[Annotated[int, Meta(ge=1)], ...]

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.cut.paths):
            raise ConfigError(
                f"{RECORD}: documents of {len(self.documents)} paths, and there are {len(self.cut.paths)}."
            )

    @property
    def cut(self) -> Levels:
        return Levels(self.levels, self.model)

    def weight(self, path: Path) -> int:
        """Return how many samples a step of a path counts as: alpha, by its documents."""
        return max(1, round(WHOLE * self.documents[self.cut.number_of(path)] / max(self.documents)))

    @property
    def flops(self) -> int:
        """Return the operations of training all paths, beside what the model took that they began as."""
        tokens = self.rounds * self.steps * self.batch_size * self.seq_len * len(self.cut.paths)
        return int(tokens * flops_per_token(decoder(self.model), self.seq_len))

    def founder(self, module: Module) -> Path:
        """Return the path that begins a module's run: the first that contains it."""
        return self.cut.paths_of(module)[0]

    def run_of(self, module: Module) -> SyncConfig:
        """Return the run that synchronises a module."""
        sharing = self.cut.paths_of(module)
        step = nesterov(self.outer, len(sharing))
        a_round = self.steps * sum(map(self.weight, sharing))
        return SyncConfig(
            name=f"{self.name}-{called(module)}",
            peers=len(sharing),
            samples=self.rounds * a_round,
            batch_size=WHOLE,
            method=DiLoCoConfig(every=self.steps, lr=step.lr, momentum=step.momentum),
            has_even_leases=True,
        )


def require_name(name: str) -> str:
    """
    Raises:
        ConfigError: paths cannot be called so.
    """
    if re.fullmatch(_NAME, name) is None:
        raise ConfigError(
            f"{name[:80]}: the folder's name is that of the paths, and has letters, digits, dots, dashes and "
            "underscores, at most 40, of which the first is a letter, a digit or an underscore. Choose another."
        )
    return name


def require_usable(shared: SharedPaths) -> None:
    """Accept what a program or a command line made, if it can be read and trained again.

    Raises:
        ConfigError: a number is out of its range, a sample is too short, or a module is shared by too many.
    """
    if shared.seq_len < LEAST_SEQ_LEN:
        raise ConfigError(
            f"--seq-len {shared.seq_len}: the first {PREFIX} tokens of a text decide its path and are not scored, so "
            f"samples have {LEAST_SEQ_LEN} tokens or more. Take longer ones, and a model that reads as many."
        )
    from_tree(_tree(shared), SharedPaths, where="these paths")
    largest = max(shared.cut.modules, key=shared.cut.num_sharing)  # of its run all numbers are largest
    from_tree(_tree(shared.run_of(largest)), SyncConfig, where=f"the run of module {called(largest)}")


def _tree(record: Config) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(record)))  # lists, as a file has them
    return found


def called(module: Module) -> str:
    """Return how people name a module: level and number, both from 0."""
    return f"{module.level}.{module.number}"


def path_called(path: Path) -> str:
    return ".".join(map(str, path))


def path_of(given: str, cut: Levels) -> Path:
    """Return the path that a person means.

    Raises:
        ConfigError: there is none; says which there are.
    """
    names = {path_called(path): path for path in cut.paths}
    if given not in names:
        some = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(f"{given[:80]!r} is no path: a number of each level, with dots between. There are {some}.")
    return names[given]


def shard_of(path: Path, *, is_heldout: bool = False) -> str:
    """Return the name of the file with a path's documents."""
    return f"path-{path_called(path)}{'.heldout' if is_heldout else ''}.jsonl"


def trained_folders(folder: Folder, shared: SharedPaths) -> dict[Path, Folder]:
    """Return where each trained path lies.

    Raises:
        ConfigError: not all are there.
    """
    found = {path: folder / TRAINED / path_called(path) for path in shared.cut.paths}
    if missing := [path_called(path) for path, at in found.items() if not at.exists()]:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing[:8])}: not all of its paths are trained, or some lie on the machines "
            f"that trained them. Copy their folders into {folder / TRAINED}."
        )
    return found


def has_paths(folder: Folder) -> bool:
    return (folder / RECORD).exists()


def read_shared(folder: Folder) -> tuple[SharedPaths, Router]:
    """
    Raises:
        ConfigError: a folder without paths, or one that was altered.
    """
    file = folder / RECORD
    try:
        if file.stat().st_size > MAX_NBYTES:
            raise ConfigError(f"{file}: larger than {MAX_NBYTES} bytes, which none is.")
        found = msgspec.json.decode(file.read_bytes(), type=SharedPaths)
        router = Router.from_bytes((folder / ROUTER).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: no such file. `weft compose route` makes a folder of paths.") from None
    except (OSError, msgspec.DecodeError, WireError) as error:
        raise ConfigError(f"{folder}: its paths cannot be read: {error}. Copy the folder again.") from None
    if found.format != FORMAT:
        raise ConfigError(
            f"{file}: format {found.format}, and this weft reads {FORMAT}. Install the one that wrote it."
        )
    if router.digest != found.router or router.record.levels != found.levels:
        raise ConfigError(f"{folder / ROUTER}: another router than {RECORD} names. Copy the folder again.")
    return found, router
