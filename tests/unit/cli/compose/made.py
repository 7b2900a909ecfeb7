"""Members of one space, as small as can be, in a home."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from weft.cli.model.trained import Trained
from weft.cli.serve.composed import open_composed
from weft.cli.serve.loading import How, load, prepared
from weft.compose.composed import Places, Stacked, read_stack, write_composed
from weft.compose.composed import place as place_of
from weft.compose.member import Member, Origin
from weft.compose.registry import Registry, write_member
from weft.compose.space import Space
from weft.compose.stacks.body import body, fresh
from weft.compose.stacks.stack import AffineConfig, Handover, Stack, identity_map, uniform, whole
from weft.data.tokenizer import ByteTokenizer
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.model.flat import assemble
from weft.model.initial import initial_vector
from weft.model.weights import read_folder
from weft.serve.generation import Model
from weft.store.chunks import raw
from weft.wire import digest

WORDS = ByteTokenizer()
CONFIG = ModelConfig(
    vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=16, ffn_width=32, max_seq_len=64, is_tied=False
)
FLOPS = 10**12  # that a member took
PARENT = Digest("ab" * 32)


def space(seed: int = 3) -> Space:
    return Space.of(assemble(CONFIG, 4 * initial_vector(CONFIG, seed)), WORDS.digest)


def write(
    home: Path,
    name: str,
    seed: int,
    *,
    of: Space | None = None,
    flops: int = FLOPS,
    scale: float = 4.0,
    num_layers: int = 1,
) -> Member:
    """Write a member that was drawn by chance.

    Args:
        flops: that it took; 0: nobody knows.
        scale: how large its numbers are.
    """
    space_of_it = of or space()
    shape = replace(CONFIG, num_layers=num_layers)
    config, vector = whole(Stack(space_of_it, (body(shape, scale * fresh(shape, seed)),)))
    member = Member(
        name=name,
        model=config,
        weights=digest(raw(vector)),
        tokenizer=WORDS.digest,
        space=space_of_it.digest,
        seed=seed,
        parent=PARENT,
        is_seeded=True,
        origins=(Origin(how="trained", tokens=1000, flops=flops),) if flops else (),
    )
    trained = Trained(Path(name), config, vector, WORDS, None)
    write_member(Registry(home).place(name), member, trained.export)
    return member


def write_all(home: Path, names: Sequence[str], num_layers: int = 1) -> list[Member]:
    return [write(home, name, seed, num_layers=num_layers) for seed, name in enumerate(names)]


def served(folder: Path, name: str, how: How, home: Path, every: int | None = None) -> Model:
    """Return what is composed in a folder, as a server has it."""
    here = prepared(how)
    (model,) = load([open_composed(folder, name, here, home, every)], here).models.values()
    return model


def write_stack(home: Path, name: str, members: Sequence[str], handover: Handover) -> Stack:
    """Write a stack of members of the home, with what stands for its controls; a map, where it has one, that changes
    much."""
    seams = uniform(handover, len(members))
    others = {"identity.1": members[0], "continued": members[0]}
    told = Stacked(
        name=name,
        members=tuple(members),
        best=members[0],
        text=PARENT,
        stack=Places(members=tuple(members), seams=seams, maps="stack"),
        how=(),
        batch_size=1,
        seq_len=16,
        flops=0,
        identity=Places(members=(members[0], "identity.1"), seams=uniform(handover, 2), maps="identity"),
        continued="continued",
    )

    def write_parts(folder: Path) -> None:
        for part, of in {**{each: each for each in members}, **others}.items():
            shutil.copytree(Registry(home).place(of), folder / part)

    is_affine = isinstance(handover, AffineConfig)
    maps = {f"stack.{n}": identity_map(CONFIG.width).cumsum(1) for n in range(len(seams)) if is_affine}
    write_composed(place_of(home, name), told, write_parts, maps)
    return read_stack(place_of(home, name), told.stack, read_folder)


@torch.no_grad()
def likeliest(stack: Stack, prompt: str, num: int) -> list[int]:
    """Return the tokens that a stack draws after a prompt, its likeliest each time, all of it computed anew."""
    tokens = [int(each) for each in WORDS.encode(prompt)]
    begun = len(tokens)
    for _ in range(num):
        tokens.append(int(stack.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[begun:]
