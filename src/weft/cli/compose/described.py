"""How a trained model came to be, as far as its folder, its run and the members of this home tell."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.terminal import WorkLine, tell
from weft.clock import SystemClock
from weft.errors import DataError
from weft.ids import Digest
from weft.progress import Meter

if TYPE_CHECKING:
    from torch import Tensor

    from weft.cli.model.trained import Trained
    from weft.compose.member import Heldout, Member, Origin
    from weft.compose.space import Space
    from weft.run.config import RunConfig
    from weft.store.home import Home


def own_space(trained: "Trained", home: Path) -> "Space | None":
    """Return the space that a model was trained in; None: it has ends of its own."""
    from weft.compose.space import Space
    from weft.run.frozen import base_of
    from weft.store.home import Home

    run = trained.run
    if run is None or not run.model.has_frozen_ends:
        return None
    ends = base_of(run, Home(home))
    assert ends is not None
    return Space.between(run.model, ends, run.data.tokenizer)


def described(name: str, trained: "Trained", home: Path) -> "Member":
    """Return how a model came to be; what its run began with counts where that is a member of this home."""
    from msgspec import structs

    from weft.compose.member import MEMBER, Member, Origin, read_member, texts_of
    from weft.cost.training import flops_per_token
    from weft.store.chunks import raw
    from weft.training.device import decoder
    from weft.wire import digest

    run, weights = trained.run, digest(raw(trained.vector))
    facts: dict[str, Any] = {
        "name": name,
        "model": trained.config,
        "weights": weights,
        "tokenizer": trained.tokenizer.digest,
    }
    if run is None:
        if (trained.folder / MEMBER).exists():
            return structs.replace(read_member(trained.folder), name=name)
        tell("it comes from no run of weft: what it was trained on, and what it began with, is not told")
        return Member(**facts)
    from weft.peer.state.checkpoint import read_contents

    head = read_contents(trained.folder).head
    tokens = 0 if head is None else int(head.committed_tokens)
    flops = int(tokens * flops_per_token(decoder(trained.config), run.train.seq_len))
    own, parent = own_space(trained, home), parent_of(run, home)
    return Member(
        **facts,
        space=None if own is None else own.digest,
        seed=run.seed,
        parent=parent,
        is_seeded=run.is_seeded,
        run=Digest(run.run),
        texts=texts_of(run.data),
        origins=(*_before(run, parent, home), Origin(how="trained", tokens=tokens, flops=flops, made=weights)),
    )


def parent_of(run: "RunConfig", home: Path) -> Digest:
    """Return what names the weights that a run began with: of a model that had learnt something, all of it, as
    `Member.weights` names them. So all that began with it are told alike, in a space or not, in stages or not.
    """
    from msgspec import UNSET

    from weft.model.peft import merged
    from weft.run.frozen import base_of
    from weft.run.staged import StagedConfig
    from weft.store.chunks import raw
    from weft.store.home import Home
    from weft.wire import digest

    is_whole = not run.model.has_frozen_ends and not isinstance(run, StagedConfig)
    if run.is_seeded or is_whole or run.model.adapter is not UNSET:
        return Digest(run.initial)
    vector, ends = _first_vector(run, Home(home)), base_of(run, Home(home))
    if vector is None:
        tell("what its run began with is not here in one piece, so it is told as another beginning than any member")
        return Digest(run.initial)
    return digest(raw(vector if ends is None else merged(run.model, ends, vector)))


def _first_vector(run: "RunConfig", home: "Home") -> "Tensor | None":
    """Return the vector that a run began with; None: a part of it is not here."""
    import torch

    from weft.model.config import num_parameters
    from weft.model.flat import paste
    from weft.run.genesis import initial
    from weft.run.staged import StagedConfig, by_section

    if not isinstance(run, StagedConfig):
        return initial(run, home)
    whole = torch.empty(num_parameters(run.model))
    for piece, each in zip(run.pieces, by_section(run), strict=True):
        if (part := initial(each, home)) is None:
            return None
        paste(run.model, whole, piece, part)
    return whole


def _before(run: "RunConfig", parent: Digest, home: Path) -> "tuple[Origin, ...]":
    """Return what was done to make what a run began with."""
    from msgspec import UNSET

    from weft.compose.member import read_member
    from weft.compose.registry import Registry

    if run.is_seeded and run.model.adapter is UNSET:
        return ()
    for weights in (parent, *([] if run.base is UNSET else [run.base])):
        if (found := Registry(home).holding(Digest(weights))) is not None:
            parent_member = read_member(found)
            tell(f"its run began with {parent_member.name}: what that took counts")
            return parent_member.origins
    tell("its run began with a model that is no member of this home: what that took is not counted")
    return ()


def heldout(trained: "Trained", home: Path) -> "Heldout | None":
    """Return the loss on the held-out text of a model's run; None: it has none, or not here."""
    from weft.cli.model.eval import heldout_of, measure
    from weft.compose.member import Heldout, name_of_text

    if trained.run is None or trained.run.data.is_paired or trained.run.data.has_tasks:
        return None
    try:
        text = heldout_of(trained, home)
    except DataError as error:
        tell(f"no held-out loss: {error}")
        return None
    with Meter("evaluating", "samples", WorkLine(), SystemClock(), text.num_windows) as meter:
        found = measure(trained.on("auto"), meter.over(text.batches(text.num_windows), lambda each: len(each.tokens)))
    return Heldout(loss=found.loss, num_tokens=found.num, text=name_of_text(trained.run.data))
