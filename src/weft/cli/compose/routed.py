"""`weft compose evaluate` of paths: text read along the path it is sent, beside each path and what all began as."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.compose.parts import Known, samples
from weft.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64

    from weft.compose.controls import Report
    from weft.compose.paths.reading import Cost
    from weft.model.transformer import Transformer


@dataclass(frozen=True)
class Routed:
    """
    Args:
        num_paths: each text is sent one of them at a time.
        num_samples, num_scored: of the text, and tokens of each that are scored: all but the first, which decide.
        cost: tokens read by a server that keeps what each path has read.
        has_rerouter: whether a router of their own sends later pieces.
        by: the same in words; empty: there are no such pieces.
    """

    name: str
    report: "Report"
    num_paths: int
    num_samples: int
    num_scored: int
    cost: "Cost"
    has_rerouter: bool
    by: str


def measured(
    folder: Path, home: Path, data: Sequence[str], windows: int, device: str, every: int | None, monolith: Known | None
) -> Routed:
    """Return the losses of paths on text, and of their controls, of the same tokens.

    Raises:
        ConfigError: the folder lacks a path, samples are too short to be routed, or the monolith reads other tokens, or
            is one of these models.
    """
    import numpy as np
    import torch

    from weft.cli.model.trained import open_trained, place
    from weft.compose.controls import OF_PATHS, Report, Row
    from weft.compose.paths.features import token_losses
    from weft.compose.paths.folder import SEED, path_called, read_rerouter, read_shared, trained_folders, which_router
    from weft.compose.paths.reading import Reader
    from weft.data.tokenizer import work_alike

    shared, router = read_shared(folder)
    folders, num_words = trained_folders(folder, shared), shared.seq_len + 1
    if num_words <= router.record.prefix:
        raise ConfigError(
            f"these paths read samples of {shared.seq_len} tokens, of which the first {router.record.prefix} decide: "
            "nothing is left to score. Route again, with a larger --seq-len."
        )
    if every is not None and every >= num_words:
        raise ConfigError(
            f"--route-every {every}: samples have {shared.seq_len} tokens, so none is routed again. Choose less."
        )
    begun = open_trained(str(folder / SEED), home)
    text, _ = samples(begun.tokenizer, data, shared.seq_len, windows)
    words = torch.cat([text.tokens, text.targets[:, -1:]], 1).numpy()
    trained = {path: open_trained(str(at), home) for path, at in folders.items()}
    models = {path: each.on(device) for path, each in trained.items()}
    rerouter = None if every is None else read_rerouter(folder, shared, every)
    reader = Reader(shared.cut, models.__getitem__, begun.vector.to(place(device)), router, every, rerouter)
    found = reader.read(words)

    def scored(model: "Transformer") -> "Float64[np.ndarray, 'texts scored']":
        return token_losses(model, words)[:, -found.num_scored :]

    def row(name: str, losses: "Float64[np.ndarray, 'texts scored']", flops: int | None) -> Row:
        return Row(name, torch.from_numpy(losses.mean(1)).float(), flops)

    took = _flops(folder / SEED)
    together = None if took is None else took + shared.flops  # by each path, too: its modules are of all who share them
    alone, likely = list[Row](), np.full((len(words), found.num_scored), -np.inf)
    for path, model in models.items():
        losses = scored(model)
        alone.append(row(f"path {path_called(path)}", losses, together))
        likely = np.logaddexp(likely, -losses)
    asked = row("ensemble", np.log(len(models)) - likely, together)
    whole = None
    if monolith is not None:
        large = open_trained(str(monolith.folder), home)
        if not work_alike(large.tokenizer, begun.tokenizer) or large.config.max_seq_len < shared.seq_len:
            raise ConfigError(
                f"--monolith {monolith.member.name}: it has another tokenizer than the paths, or reads fewer than "
                f"{shared.seq_len} tokens. Name one that reads what they read."
            )
        if any(torch.equal(large.vector, each.vector) for each in (begun, *trained.values())):
            raise ConfigError(
                f"--monolith {monolith.member.name}: it is one of the paths, or what they began as. Name one that was "
                "trained whole."
            )
        whole = row(monolith.member.name, scored(large.on(device)), monolith.member.flops or None)
    report = Report(
        composed=Row(shared.name, torch.from_numpy(found.losses / found.num_scored).float(), together),
        exits=(),
        members=tuple(alone),
        needed=OF_PATHS,
        controls={
            "best single": min(alone, key=lambda each: each.loss),
            "ensemble": asked,
            "seed": row("seed", scored(begun.on(device)), took),
            "monolith": whole,
        },
    )
    by = "" if every is None else which_router(folder, every, rerouter)
    return Routed(
        shared.name, report, len(models), len(words), found.num_scored, found.keeping, rerouter is not None, by
    )


def _flops(seed: Path) -> int | None:
    """Return what the model took that all paths began as; None: nobody knows."""
    from weft.compose.member import MEMBER, read_member

    return read_member(seed).flops or None if (seed / MEMBER).exists() else None
