"""`weft compose split | mix`: documents for experts, and members that are asked together, or averaged.

weft compose split parts --data TEXTS --num 4                               a file for each expert to train on
weft compose mix english python --data dev.txt --name both                  each counts as likely as a text is its own
weft compose mix english python --data dev.txt --name both --how distance --clusters split
weft compose mix english python --data dev.txt --name one --how soup        one model: where members began alike
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.compose.parts import (
    MOST_CHOSEN,
    Device,
    HeldOut,
    Known,
    Members,
    NewName,
    SeqLen,
    halves,
    known,
    new_place,
    reader,
    samples,
    seq_len_of,
)
from weft.cli.home import home_of
from weft.cli.options import own_source
from weft.cli.settings import refuse_idle
from weft.cli.terminal import say_loading, tell
from weft.dashboard import figures
from weft.errors import ConfigError, WireError
from weft.ids import several

if TYPE_CHECKING:
    from torch import Tensor

    from weft.compose.experts.clusters import Clusters
    from weft.compose.experts.ensemble import Model
    from weft.data.rows import Batch


LEAST_PRIOR = 1e-6  # Bayes never gives weight to what has none


class Mixing(StrEnum):
    posterior = "posterior"
    distance = "distance"
    uniform = "uniform"
    soup = "soup"


def mix(
    context: typer.Context,
    members: Members,
    data: HeldOut,
    name: NewName,
    how: Annotated[
        Mixing,
        typer.Option(
            help="posterior: each counts as likely as the text so far is its own. distance: by what the text is about. "
            "uniform: all alike. soup: the mean of their weights, a member of its own."
        ),
    ] = Mixing.posterior,
    top: Annotated[int, typer.Option(help="So many count, the others nothing; 0: all.", min=0, max=64)] = 0,
    clusters: Annotated[
        Path | None,
        typer.Option(help="With --how distance: the folder of `weft compose split`, in whose order members stand."),
    ] = None,
    seq_len: SeqLen = None,
    device: Device = "auto",
) -> None:
    """Let members answer together, by text that tells how likely each is; or average them."""
    from weft.compose.member import require_causal, require_name, require_one_parent

    if how is not Mixing.distance:
        refuse_idle(context, "only --how distance looks at what texts are about", "clusters")
    elif clusters is None:
        raise ConfigError("--how distance wants --clusters, the folder that `weft compose split` wrote.")
    if how is Mixing.soup:
        refuse_idle(context, "a soup is one model", "top")
    home, there = home_of(context), known(context, members)
    told = [each.member for each in there]
    for each in told:
        require_causal(each)
    if top > len(there):
        raise ConfigError(f"--top {top} of {len(there)} members. Choose fewer.")
    if how is Mixing.soup:
        require_one_parent(told)
        _soup(home, there, require_name(name), data, seq_len, device)
        return
    folder = new_place(context, name)
    say_loading()
    from weft.cli.model.trained import open_words
    from weft.compose.composed import Experts, write_composed
    from weft.compose.controls import losses
    from weft.compose.experts.split import CLUSTERS
    from weft.model.flat import assemble
    from weft.wire import encode

    about = None if clusters is None else _clusters(clusters)
    if about is not None and about.num != len(there):
        raise ConfigError(f"{clusters} has {about.num} clusters, and these are {len(there)} members. Name one of each.")
    tokenizer, _ = open_words(str(there[0].folder), home)
    length = seq_len_of(told, seq_len)
    text, named = samples(tokenizer, data, length, MOST_CHOSEN)
    models = [assemble(*reader(home, device)(each.folder)) for each in there]
    here = text.to(models[0].embed.weight.device)
    alone = [float(losses(each, here).mean()) for each in models]
    record = Experts(
        name=name,
        members=tuple(each.name for each in told),
        weighting=_weighting(how),
        prior=_prior(models, here) if how is Mixing.posterior else (1 / len(there),) * len(there),
        top=top or None,
        seq_len=length,
        best=told[alone.index(min(alone))].name,
        text=named,
    )

    def write_parts(inner: Path) -> None:
        for each in there:
            shutil.copytree(each.folder, inner / each.member.name)
        if about is not None:
            (inner / CLUSTERS).write_bytes(encode(about.record))

    write_composed(folder, record, write_parts)
    typer.echo(str(folder))
    for member, words in zip(told, [] if about is None else about.words(6), strict=False):
        tell(f"{member.name} is asked for {', '.join(words)}")
    tell(f"what it is worth beside its controls: weft compose evaluate {name} --data TEXT --monolith MEMBER")
    tell(f"to ask it: weft serve {name}")


def split(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    data: Annotated[list[str], typer.Option(help="Documents, folders or globs; may be repeated.", show_default=False)],
    num: Annotated[int, typer.Option(help="Of clusters; each trains an expert.", min=2, max=256)] = 4,
    clusters: Annotated[
        Path | None,
        typer.Option(help="A folder that was written so, perhaps by somebody else: sort these documents as those."),
    ] = None,
    heldout: Annotated[float, typer.Option(help="Share of documents that nobody trains on.", min=0.0, max=0.5)] = 0.05,
    seed: Annotated[int, typer.Option(help="Of what is drawn.", min=0)] = 0,
) -> None:
    """Sort documents by what they are about, into a file for each expert: no documents leave this machine."""
    if clusters is not None:
        refuse_idle(context, "--clusters says how many there are, and where", "num", "seed")
    from weft.compose.experts.split import file_of, find_clusters, split_documents

    source, base = own_source(data), Path.cwd()
    found = find_clusters(source, base, heldout, num, seed) if clusters is None else _clusters(clusters)
    told = split_documents(source, base, heldout, found, folder)
    for number, each in enumerate(told.clusters):
        amount = f"{several(each.train.num_documents, 'document')}, {figures.nbytes(each.train.nbytes)}"
        typer.echo(f"{folder / file_of(number, 'train')}: {amount}: {', '.join(each.words[:6])}")


def _clusters(folder: Path) -> "Clusters":
    """
    Raises:
        ConfigError: it holds none.
    """
    from weft.compose.experts.split import read_clusters

    try:
        return read_clusters(folder)
    except (OSError, WireError) as error:
        raise ConfigError(f"--clusters {folder}: {error}. Name the folder that `weft compose split` wrote.") from None


def _weighting(how: Mixing) -> 'Literal["posterior", "distance", "uniform"]':
    match how:
        case Mixing.posterior:
            return "posterior"
        case Mixing.distance:
            return "distance"
        case Mixing.uniform | Mixing.soup:
            return "uniform"


def _prior(models: "Sequence[Model]", text: "Batch") -> tuple[float, ...]:
    """Return how likely each expert is before anything is known, by text like that which will come: as likely as all of
    it was found to be each one's, and never nothing."""
    import torch

    from weft.compose.experts.ensemble import Posterior, likelihoods
    from weft.compose.experts.ensemble import losses as mixed_losses

    posterior = Posterior(torch.full((len(models),), 1 / len(models)))
    likely = likelihoods(models, text.tokens, text.targets).cpu()
    mixed_losses(posterior, text.tokens.cpu(), text.targets.cpu(), likely)
    found = posterior.log_weights().exp().double().mean(0) + LEAST_PRIOR
    return tuple((found / found.sum()).tolist())


def _soup(home: Path, there: Sequence[Known], name: str, data: Sequence[str], seq_len: int | None, device: str) -> None:
    """Write the mean of those members' weights that lower its loss, as a member."""
    from weft.compose.registry import Registry

    folder = Registry(home).place(name)
    if folder.exists():
        raise ConfigError(f"{folder}: exists; a member is never written over. Choose another --name.")
    say_loading()
    from msgspec import structs

    from weft.cli.model.trained import open_trained, place
    from weft.compose.controls import losses
    from weft.compose.experts.soup import Ingredient, greedy
    from weft.compose.member import Origin
    from weft.compose.registry import write_member
    from weft.model.flat import assemble
    from weft.store.chunks import raw
    from weft.wire import digest

    opened = {each.member.name: open_trained(str(each.folder), home) for each in there}
    model, parent, on = there[0].member.model, there[0].member.parent, place(device)
    assert parent is not None  # as members of a soup have
    text, _ = samples(
        opened[there[0].member.name].tokenizer, data, seq_len_of([each.member for each in there], seq_len), MOST_CHOSEN
    )
    dev, test = halves(text, on)

    def loss(vector: "Tensor", on_text: "Batch") -> float:
        return float(losses(assemble(model, vector.to(on)), on_text).mean())

    ingredients = [Ingredient(name, each.vector, parent) for name, each in opened.items()]
    made = greedy(ingredients, lambda vector: loss(vector, dev))
    taken = [each.member for each in there if each.member.name in made.names]
    first = taken[0]
    told = structs.replace(
        first,
        name=name,
        weights=digest(raw(made.vector)),
        texts=tuple({text.digest: text for each in taken for text in each.texts}.values()),
        origins=(
            *(origin for each in taken for origin in each.origins),
            Origin(how="soup", of=tuple(each.weights for each in taken)),
        ),
        heldout=None,
    )
    write_member(folder, told, replace(opened[first.name], vector=made.vector).export)
    typer.echo(str(folder))
    said = f"the mean of {', '.join(made.names)}: {loss(made.vector, test):.3f} nats a token"
    left = [each.member.name for each in there if each.member.name not in made.names]
    tell(said + (f"; with {', '.join(left)} it was worse" if left else ""))
    for each in there:
        tell(f"{each.member.name} alone: {loss(opened[each.member.name].vector, test):.3f}")
    tell(f"what it is worth beside its controls: weft compose evaluate {name} --data TEXT --monolith MEMBER")
