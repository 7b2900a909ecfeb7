"""How a trained model came to be, as far as its folder, its run and the members of this home tell."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.terminal import WorkLine, tell
from weft.clock import SystemClock
from weft.errors import DataError
from weft.ids import Digest
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.cli.model.trained import Trained
    from weft.compose.member import Heldout, Member, Origin
    from weft.compose.space import Space
    from weft.run.config import RunConfig


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
    own = own_space(trained, home)
    return Member(
        **facts,
        space=None if own is None else own.digest,
        seed=run.seed,
        parent=run.initial,
        is_seeded=run.is_seeded,
        run=Digest(run.run),
        texts=texts_of(run.data),
        origins=(*_before(run, home), Origin(how="trained", tokens=tokens, flops=flops, made=weights)),
    )


def _before(run: "RunConfig", home: Path) -> "tuple[Origin, ...]":
    """Return what was done to make what a run began with."""
    from msgspec import UNSET

    from weft.compose.member import read_member
    from weft.compose.registry import Registry

    if run.is_seeded and run.model.adapter is UNSET:
        return ()
    for weights in (run.initial, *([] if run.base is UNSET else [run.base])):
        if (found := Registry(home).holding(Digest(weights))) is not None:
            parent = read_member(found)
            tell(f"its run began with {parent.name}: what that took counts")
            return parent.origins
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
