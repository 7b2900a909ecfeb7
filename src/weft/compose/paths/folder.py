"""What all who train paths have: how the model is cut, who reads what, and how long they train.

    talk/ seed/                        the model whose features route documents, and that all paths begin as: a member
          modules/0.1.safetensors      after a phase before: what a module begins as instead
          router.bin                   which path a document takes, by its first tokens
          rerouter-64.bin              which path goes on, by the 64 tokens before: once paths are trained
          path-0.1.jsonl               documents of a path; of held-out ones and of the routers': `dealing`
          paths.json                   levels, steps, rounds
          trained/0.1/                 a path, once it is trained, as it was best: a Hugging Face folder
          trained/0.1/modules/         its modules as their runs ended: the next phase begins with them
          trained/0.1/path.json        which path it is, and of which phase

A module is synchronised by a run of its own among the paths that contain it. Its name, weights and outer rate follow
from this folder, so all who have it agree. The name has a part of the record's digest: what another folder of the same
name has left in a home is not gone on with.

A phase is a folder. The next one has documents dealt anew (`resharding`), and modules as the phase before left them.

DiPaCo: Douillard et al., 2403.10616.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path as Folder
from typing import Annotated, Any

import msgspec
import torch
from jaxtyping import Float32
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from weft.compose.paths.levels import Levels, LevelsConfig, Module, Path
from weft.compose.paths.modules import Modules
from weft.compose.paths.outer import OuterStepConfig, nesterov
from weft.compose.paths.routing import PREFIX, Router
from weft.compose.space import numbers_digest
from weft.config import Config, from_tree
from weft.cost.training import flops_per_token
from weft.errors import ConfigError, WireError
from weft.ids import Digest, short
from weft.model.config import ModelConfig
from weft.model.flat import paste
from weft.model.weights import whole_folder, write_json
from weft.run.config import SyncConfig
from weft.sync.method.presets import DiLoCoConfig
from weft.training.device import decoder
from weft.wire import digest_of

FORMAT = 1
RECORD, ROUTER, SEED, TRAINED = "paths.json", "router.bin", "seed", "trained"
PATH = "path.json"
MODULES, FOR_ROUTER = "modules", "router.jsonl"
WHOLE = 1000  # samples that a step of the largest shard counts as: others' steps count by their documents
LEAST_SEQ_LEN = PREFIX + 2  # of a sample: some of it is scored
MAX_NBYTES = 1 << 20

_Hex = Annotated[Digest, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_NAME = r"\A\w[\w.-]{0,39}\Z"  # a module's run is called so, with a part of a digest and two numbers more


class SharedPaths(Config, frozen=True, kw_only=True):
    """
    Args:
        model: what each path is.
        seed_model: digest of the vector that features come from, and that all begin as in the first phase.
        begun: digests of what modules begin as, in the order of `Levels.modules`; none: parts of the seed model.
        steps: of a path in a round: tau.
        rounds: of this phase.
        rounds_before: of phases before, whose steps, samples and rate were the same.
        more_rounds: that are to follow in phases to come: the rate falls over all of them.
        documents: of each path's shard, in the order of `Levels.paths`.
        overlap: paths that train on a document.
        lr: peak learning rate of a path's own steps.

    Raises:
        ConfigError: documents or modules of other paths.
    """

    format: int = FORMAT
    name: Annotated[str, Meta(pattern=_NAME)]
    levels: LevelsConfig
    model: ModelConfig
    tokenizer: _Hex
    seed_model: _Hex
    begun: tuple[_Hex, ...] = ()
    router: _Hex
    steps: Annotated[int, Meta(ge=1, le=100_000)]
    rounds: Annotated[int, Meta(ge=1, le=10**6)]
    rounds_before: Annotated[int, Meta(ge=0, le=10**6)] = 0
    more_rounds: Annotated[int, Meta(ge=0, le=10**6)] = 0
    batch_size: Annotated[int, Meta(ge=1, le=100_000)]
    seq_len: Annotated[int, Meta(ge=2)]
    lr: Annotated[float, Meta(gt=0, le=10)]
    outer: OuterStepConfig = OuterStepConfig()
    documents: tuple[Annotated[int, Meta(ge=1)], ...]
    overlap: Annotated[int, Meta(ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.cut.paths):
            raise ConfigError(
                f"{RECORD}: documents of {len(self.documents)} paths, and there are {len(self.cut.paths)}."
            )
        if self.begun and len(self.begun) != len(self.cut.modules):
            raise ConfigError(f"{RECORD}: {len(self.begun)} modules, and there are {len(self.cut.modules)}.")

    @property
    def cut(self) -> Levels:
        return Levels(self.levels, self.model)

    def weight(self, path: Path) -> int:
        """Return how many samples a step of a path counts as: alpha, by its documents."""
        return max(1, round(WHOLE * self.documents[self.cut.number_of(path)] / max(self.documents)))

    @property
    def flops(self) -> int:
        """Return the operations of training all paths, in all phases so far, beside what the seed model took."""
        rounds = self.rounds_before + self.rounds
        tokens = rounds * self.steps * self.batch_size * self.seq_len * len(self.cut.paths)
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
            name=f"{self.name}-{short(digest_of(self))}-{called(module)}",
            peers=len(sharing),
            samples=self.rounds * a_round,
            batch_size=WHOLE,
            method=DiLoCoConfig(every=self.steps, lr=step.lr, momentum=step.momentum),
            has_even_leases=True,
        )


class TrainedAs(Config, frozen=True, kw_only=True):
    """What stands beside a path that is trained.

    Args:
        paths: digest of the record of the paths that it is one of, in their phase.
        path: which.
    """

    paths: _Hex
    path: str


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
    if shared.overlap > (num := len(shared.cut.paths)):
        raise ConfigError(f"--overlap {shared.overlap}: there are {num} paths. Choose at most as many.")
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
        ConfigError: not all are there, or one was trained elsewhere: as another path, or in another phase.
    """
    found = {path: folder / TRAINED / path_called(path) for path in shared.cut.paths}
    if missing := [path_called(path) for path, at in found.items() if not at.exists()]:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing[:8])}: not all of its paths are trained, or some lie on the machines "
            f"that trained them. Copy their folders into {folder / TRAINED}."
        )
    paths = digest_of(shared)
    for path, at in found.items():
        if _trained_as(at) != TrainedAs(paths=paths, path=path_called(path)):
            raise ConfigError(
                f"{at}: was not trained as path {path_called(path)} of {folder}, or not in this phase. Copy there what "
                "`weft compose path` has written for it."
            )
    return found


def _trained_as(at: Folder) -> TrainedAs | None:
    try:
        return msgspec.json.decode((at / PATH).read_bytes(), type=TrainedAs)
    except (OSError, msgspec.DecodeError):
        return None


# --- modules ---


def begun_vector(
    folder: Folder, shared: SharedPaths, path: Path, seed: Float32[torch.Tensor, " num"]
) -> Float32[torch.Tensor, " num"]:
    """Return what a path begins as: a copy.

    Args:
        seed: the vector in the folder's `SEED`.

    Raises:
        ConfigError: it is another model than the paths are of, or a module is missing, or was altered.
    """
    require_seed(folder, shared, seed)
    whole, mine = seed.clone(), shared.cut.modules_of(path)
    for module, digest in zip(shared.cut.modules, shared.begun, strict=False):  # of the first phase there are none
        if module in mine:
            part = read_module(folder, shared.cut, module)
            if numbers_digest(part) != digest:
                raise ConfigError(
                    f"{module_file(folder, module)}: another module than {RECORD} names. Copy the folder again."
                )
            paste(shared.model, whole, shared.cut.section_of(module), part)
    return whole


def require_seed(folder: Folder, shared: SharedPaths, seed: Float32[torch.Tensor, " num"]) -> None:
    """
    Raises:
        ConfigError: what lies in the folder as `SEED` is another model than the paths are of.
    """
    if numbers_digest(seed) != shared.seed_model:
        raise ConfigError(f"{folder / SEED}: another model than the paths begin as. Copy the folder again.")


def last_modules(folder: Folder, shared: SharedPaths) -> Modules:
    """Return all modules as their runs ended, from the paths that are trained.

    Raises:
        ConfigError: not all paths are there, or two of them do not have the same module.
    """
    trained, found = trained_folders(folder, shared), dict[Module, Float32[torch.Tensor, " num"]]()
    for module in shared.cut.modules:
        first, *others = shared.cut.paths_of(module)
        found[module] = read_module(trained[first], shared.cut, module)
        for other in others:
            if not torch.equal(read_module(trained[other], shared.cut, module), found[module]):
                raise ConfigError(
                    f"{folder / TRAINED}: paths {path_called(first)} and {path_called(other)} have different modules "
                    f"{called(module)}, which they were trained to share. Copy both again, from those who trained "
                    "them. Where one was started again after the other had ended, it went on alone: give it the "
                    f"other's file {module_file(Folder(), module)}."
                )
    return Modules(shared.cut, found)


def write_trained(
    folder: Folder,
    shared: SharedPaths,
    path: Path,
    vectors: Mapping[Module, Float32[torch.Tensor, " num"]],
    write_model: Callable[[Folder], None],
) -> None:
    """Write a path that is trained, whole or not at all.

    Args:
        vectors: its modules as their runs ended.
        write_model: writes the path as it was best, as a Hugging Face folder at a place that is not there yet.

    Raises:
        ConfigError: the folder is taken, or cannot be written.
        DiskFull: no room.
    """
    with whole_folder(folder, last="config.json") as partial:
        inner = partial / ".model"
        write_model(inner)
        for file in inner.iterdir():
            file.rename(partial / file.name)
        inner.rmdir()
        write_modules(partial, vectors)
        note_trained(partial, shared, path)


def note_trained(folder: Folder, shared: SharedPaths, path: Path) -> None:
    """Write beside a path that is trained which it is, and of which paths."""
    write_json(folder / PATH, TrainedAs(paths=digest_of(shared), path=path_called(path)))


def write_modules(folder: Folder, vectors: Mapping[Module, Float32[torch.Tensor, " num"]]) -> None:
    (folder / MODULES).mkdir()
    for module, vector in vectors.items():
        save_file({"vector": vector.detach().cpu().contiguous()}, module_file(folder, module))


def read_module(folder: Folder, cut: Levels, module: Module) -> Float32[torch.Tensor, " num"]:
    """
    Raises:
        ConfigError: it is missing, cannot be read, or is of other levels.
    """
    file, num = module_file(folder, module), cut.num_parameters(module)
    try:
        found = load_file(file).get("vector")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Copy the folder again, with all that is in it.") from None
    if found is None or found.dtype != torch.float32 or found.shape != (num,):
        raise ConfigError(f"{file}: not the {num:,} numbers of module {called(module)}. Copy the folder again.")
    return found


def module_file(folder: Folder, module: Module) -> Folder:
    return folder / MODULES / f"{called(module)}.safetensors"


# --- routers ---


def rerouter_file(folder: Folder, every: int) -> Folder:
    return folder / f"rerouter-{every}.bin"


def read_rerouter(folder: Folder, shared: SharedPaths, every: int) -> Router | None:
    """Return the router of texts that are routed again every so many tokens; None: there is none.

    Raises:
        ConfigError: it cannot be read, or is of other paths.
    """
    file = rerouter_file(folder, every)
    if not file.exists():
        return None
    try:
        found = Router.from_bytes(file.read_bytes())
    except (OSError, WireError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Make it again: weft compose reroute.") from None
    has = (found.record.levels, found.record.features, found.record.prefix)
    if has != (shared.levels, shared.seed_model, every):
        raise ConfigError(
            f"{file}: a router of other paths, of features of {short(found.record.features)} and pieces of "
            f"{found.record.prefix} tokens. Make it again: weft compose reroute."
        )
    return found


def which_router(folder: Folder, every: int, rerouter: Router | None) -> str:
    """Return in words by which router pieces of a text find their path."""
    if rerouter is None:
        return (
            f"pieces of {every} tokens go by the router of first tokens. One of their own: weft compose reroute "
            f"{folder} --every {every}"
        )
    return f"pieces of {every} tokens go by {rerouter_file(folder, every).name}, which is their own"


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
