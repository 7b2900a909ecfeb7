"""Four blocks, each trained alone to denoise, against the same layers trained end to end: writes reports/blocks.md.

    python -m benchmarks.blocks --into FILE            # 50 minutes of one core; goes on from where it was stopped
    python -m benchmarks.blocks --into FILE --report   # writes the report of what is there

On the standard library's source, byte by byte, in one space: the ends of a decoder of two layers, trained first on a
quarter of the tokens and frozen. Every model then reads the same tokens in the same order, at one learning rate that
was chosen for none of them:

- end to end: all layers, as any decoder, between the frozen ends;
- its own ends: the same with ends that it trains itself, an ordinary decoder, which is what others compare blocks with;
- blocks: four blocks of a quarter of the layers, each alone (`weft.compose.blocks`), then one after the other;
- less noise: such blocks again, whose range of noise begins lower. The usual one is a reading of what is published
  (`weft.compose.blocks.noise`), and no more;
- controls: four decoders of a quarter of the layers, which differ by their seeds and know nothing of noise. What blocks
  gain over one of these, and over the mean of all four, they gain by denoising.

Losses are of held-out windows, in nats per token; +- is the standard error over windows, of a gap that of paired ones.
One draw is how BlockTrain tells its loss; a text is drawn from the mean over all draws (`weft.compose.blocks.decode`).
Noise is drawn as usual or is 0, which no block was trained for: both are language models, for no target is asked.

Operations are counted in one step of each as it is computed, and are of all its steps: a block reads its text and its
noisy targets, two streams through the same layers, so four blocks take 1.6 times as many as all layers end to end. CPU
seconds are those of a machine that may have been busy. There is one seed of each, and errors are of the text alone.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import log, sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.report import FOLDER, load, load_line, table, whole
from weft import wire
from weft.compose.blocks.block import DenoisingBlock, block_over, fresh
from weft.compose.blocks.decode import DenoisingModel
from weft.compose.blocks.noise import NoiseConfig, NoiseLevels
from weft.compose.space import Space
from weft.data.batch import Batches
from weft.data.corpus import CorpusConfig
from weft.data.packing import pack
from weft.data.rows import Batch
from weft.data.store import ShardStore
from weft.data.tokenizer import ByteTokenizer
from weft.model import sections
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, assemble, over
from weft.model.initial import initial_vector
from weft.model.sections import Section
from weft.model.transformer import SectionModule
from weft.sync.method.choices import AdamWConfig
from weft.sync.method.schedule import CosineConfig, lr
from weft.training import optimizer

NUM_BLOCKS = 4
TOKENS = 1 << 21  # that each model reads
SEQ_LEN, BATCH = 128, 8
RATE, CLIP, WARM_UP = 2e-3, 1.0, 0.05
WINDOWS, DRAWS = 256, 8
SEED = 1
PUBLISHED = (1.359, 1.32)  # BlockTrain, arXiv:2606.24722: four blocks, end to end; byte-level WikiText
SHAPE = ModelConfig(
    vocab_size=ByteTokenizer.vocab_size,
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    width=128,
    ffn_width=344,
    max_seq_len=SEQ_LEN,
    has_qk_norm=True,
)
QUARTER = msgspec.structs.replace(SHAPE, num_layers=SHAPE.num_layers // NUM_BLOCKS)
NOISES = {  # by how its blocks are named
    "block": NoiseLevels(NoiseConfig(), SHAPE.width),
    "lower block": NoiseLevels(NoiseConfig(low=0.3), SHAPE.width),
}

Loss = Callable[[Batch, int], Tensor]
Losses = Mapping[str, NDArray[np.float64]]  # of held-out windows


# --- what is kept ---


def configured() -> str:
    """Return what names the settings that vectors and losses depend on, but for the scale."""
    noises = {kind: noise.config for kind, noise in NOISES.items()}
    settings = (SHAPE, QUARTER, noises, TOKENS, SEQ_LEN, BATCH, RATE, CLIP, WARM_UP, WINDOWS, DRAWS, SEED)
    return wire.digest(msgspec.json.encode(settings))


@dataclass
class Kept:
    """Vectors of what is trained, losses of held-out windows, and what that took; in one file.

    Args:
        seconds: of the CPU.
        operations: of all steps.
    """

    path: Path
    scale: float
    vectors: dict[str, Tensor]
    losses: dict[str, list[float]]
    seconds: dict[str, float]
    operations: dict[str, float]

    @classmethod
    def at(cls, path: Path, scale: float) -> "Kept":
        """
        Raises:
            SystemExit: the file is of another scale, or of other settings.
        """
        if not path.exists():
            return cls(path, scale, {}, {}, {}, {})
        with safe_open(path, "pt") as file:
            told = json.loads(file.metadata()["found"])
            vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        if told["scale"] != scale:
            raise SystemExit(f"{path} was made with --scale {told['scale']:g}. Give that, or another file.")
        if told.get("configured") != configured():
            raise SystemExit(f"{path} was made with other settings than this program has now. Give another file.")
        return cls(path, scale, vectors, told["losses"], told["seconds"], told["operations"])

    def save(self) -> None:
        """Write what is there in the file's place."""
        beside = self.path.with_name(self.path.name + ".new")
        found = {"scale": self.scale, "configured": configured()}
        found |= {name: getattr(self, name) for name in ("losses", "seconds", "operations")}
        save_file(self.vectors, beside, {"found": json.dumps(found)})
        os.replace(beside, self.path)


# --- training ---


def train(flat: FlatModel, loss_of: Loss, batches: Batches, tokens: int) -> float:
    """Train on so many tokens, from the first on; return the CPU seconds."""
    began, size = time.process_time(), SEQ_LEN * BATCH
    schedule = CosineConfig(lr=RATE, warmup_tokens=int(WARM_UP * tokens), total_tokens=tokens)
    optimize = optimizer.build(AdamWConfig(beta2=0.99), flat)
    for step in range(tokens // size):
        batch = batches.at(np.arange(step * BATCH, (step + 1) * BATCH))
        flat.zero_gradient()
        loss_of(batch, step).backward()  # type: ignore[no-untyped-call]
        norm = float(vector_norm(flat.gradient))
        flat.gradient.mul_(min(1.0, CLIP / norm))
        optimize.step(lr(schedule, (step + 1) * size))
    return time.process_time() - began


def operations(loss_of: Loss, batch: Batch) -> float:
    """Return the operations of a step: of products of matrices, there and back, with masked scores as if they counted.

    The gradient is left behind.
    """
    aten = torch.ops.aten
    own: dict[Any, Any] = {  # what torch counts of no CPU
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: _of_attention(q, k),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: 2 * _of_attention(q, k),
    }
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        loss_of(batch, 0).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


def _of_attention(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """Return the operations of scores and of sums of values. A shape is of batch, heads, tokens, width."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


def decoder_over(config: ModelConfig, section: Section, vector: Tensor) -> FlatModel:
    with torch.device("meta"):
        module = SectionModule(config, section)
    return over(module, vector)


def body_section(config: ModelConfig) -> Section:
    return Section(1, 3, range(config.num_layers))


def blocks_of(kept: Kept, kind: str, space: Space) -> list[DenoisingBlock]:
    """Return the trained blocks of one range of noise."""
    flats = (
        block_over(kept.vectors[f"{kind} {number}"], QUARTER, space, NOISES[kind], (number, NUM_BLOCKS))
        for number in range(NUM_BLOCKS)
    )
    return [flat.block.requires_grad_(False) for flat in flats]


def space_of(kept: Kept) -> Space:
    return Space.of(assemble(QUARTER, kept.vectors["space"]), ByteTokenizer().digest)


def train_all(kept: Kept, batches: Batches) -> None:
    """Train what is not there yet; each is kept once it has all its tokens."""
    tokens = int(TOKENS * kept.scale)

    def once(name: str, make: Callable[[], tuple[FlatModel, Loss]], num_tokens: int = tokens) -> None:
        if name not in kept.vectors:
            flat, loss_of = make()
            a_step = operations(loss_of, batches.at(np.arange(BATCH)))
            kept.operations[name] = a_step * (num_tokens // (SEQ_LEN * BATCH))
            kept.seconds[name] = train(flat, loss_of, batches, num_tokens)
            kept.vectors[name] = flat.vector
            kept.save()
            print(f"{name}: {kept.seconds[name]:.0f} CPU seconds", flush=True)

    def ordinary(config: ModelConfig) -> tuple[FlatModel, Loss]:
        flat = decoder_over(config, sections.whole(config), initial_vector(config, SEED))
        return flat, lambda batch, _step: flat.module.loss(batch.tokens, batch.targets)

    once("space", partial(ordinary, QUARTER), tokens // 4)
    space = space_of(kept)

    def decoder(config: ModelConfig, seed: int) -> tuple[FlatModel, Loss]:
        section = body_section(config)
        flat = decoder_over(config, section, initial_vector(config, seed, section))
        return flat, lambda batch, _step: space.loss(flat.module(space.begin(batch.tokens)), batch.targets)

    def block(kind: str, number: int) -> tuple[FlatModel, Loss]:
        place = number, NUM_BLOCKS
        flat = block_over(fresh(QUARTER, SEED + number), QUARTER, space, NOISES[kind], place)
        return flat, lambda batch, step: flat.block.loss_of_step(batch.tokens, batch.targets, SEED, step)

    once("end to end", lambda: decoder(SHAPE, SEED))
    once("own ends", partial(ordinary, SHAPE))
    for number in range(NUM_BLOCKS):
        for kind in NOISES:
            once(f"{kind} {number}", partial(block, kind, number))
        once(f"alone {number}", partial(decoder, QUARTER, SEED + number))


# --- held-out losses ---


@torch.inference_mode()
def evaluate_all(kept: Kept, batches: Batches) -> None:
    """Find the loss of each held-out window by each model."""
    began, space = time.process_time(), space_of(kept)
    blocks = {kind: blocks_of(kept, kind, space) for kind in NOISES}
    decoders = {
        name: decoder_over(config, body_section(config), kept.vectors[name]).module
        for name, config in {"end to end": SHAPE, **{f"alone {n}": QUARTER for n in range(NUM_BLOCKS)}}.items()
    }
    whole_models = {
        "space": assemble(QUARTER, kept.vectors["space"]),
        "own ends": assemble(SHAPE, kept.vectors["own ends"]),
    }
    found = dict[str, list[float]]()

    def note(name: str, likelihoods: Tensor) -> None:
        found.setdefault(name, []).extend((-likelihoods.double().mean(1)).tolist())

    for batch in batches.spread(max(8, int(WINDOWS * min(1.0, 10 * kept.scale))), BATCH):
        for name, model in whole_models.items():
            note(name, of_targets(model(batch.tokens), batch))
        told = {
            name: of_targets(space.logits(body(space.begin(batch.tokens))), batch) for name, body in decoders.items()
        }
        for name, likelihoods in told.items():
            note(name, likelihoods)
        alone = torch.stack([told[f"alone {number}"] for number in range(NUM_BLOCKS)])
        note("ensemble", torch.logsumexp(alone, 0) - log(NUM_BLOCKS))
        for kind, each in blocks.items():
            denoising = DenoisingModel(each)
            contexts, noise = denoising.read(batch.tokens), denoising.noise(SEED, 0)[:SEQ_LEN]
            for number, logits in enumerate(denoising.exits(contexts, noise)):
                note(f"{kind}, exit {number}", of_targets(logits, batch))
            note(f"{kind}, no noise", of_targets(denoising.logits(contexts, torch.zeros_like(noise)), batch))
            for num_steps in (1, 4):
                likelihoods = DenoisingModel(each, num_steps).log_likelihoods(batch.tokens, batch.targets, SEED, 1)
                note(f"{kind}, draws 1, steps {num_steps}", likelihoods)
            likelihoods = denoising.log_likelihoods(batch.tokens, batch.targets, SEED, DRAWS)
            note(f"{kind}, draws {DRAWS}", likelihoods)
    kept.losses, kept.seconds["evaluation"] = found, time.process_time() - began
    kept.save()


def of_targets(logits: Tensor, batch: Batch) -> Tensor:
    """Return ln p of each target."""
    return -cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(batch.targets)


# --- the report ---


def against(losses: Losses, name: str, other: str) -> list[str]:
    """Return how much higher the loss of a row is than another's, with its paired error, and by how many per cent."""
    if name == other:
        return ["", ""]
    gap = losses[name] - losses[other]
    error = gap.std(ddof=1) / sqrt(len(gap))
    return [f"{gap.mean():+.4f} +- {error:.4f}", f"{100 * gap.mean() / losses[other].mean():+.1f} %"]


def rows_of(kept: Kept) -> list[list[object]]:
    """Return the rows of the table of losses."""
    losses = {name: np.array(each) for name, each in kept.losses.items()}

    def row(name: str, key: str, *trained: str) -> list[object]:
        found = losses[key]
        cells = [f"{found.mean():.4f} +- {found.std(ddof=1) / sqrt(len(found)):.4f}"]
        cells += [*against(losses, key, "end to end"), *against(losses, key, "own ends")]
        took = [
            f"{sum(kept.operations[each] for each in trained):.3g}",
            round(sum(kept.seconds[each] for each in trained)),
        ]
        return [name, *cells, *(took if trained else ["", ""])]

    layers, alone = QUARTER.num_layers, [f"alone {number}" for number in range(NUM_BLOCKS)]
    rows = [
        row(f"end to end, {SHAPE.num_layers} layers", "end to end", "end to end"),
        row("the same, its own ends trained too", "own ends", "own ends"),
    ]
    for kind, noise in NOISES.items():
        trained = [f"{kind} {number}" for number in range(NUM_BLOCKS)]
        told = f"{NUM_BLOCKS} blocks of {layers} layers, noise from {noise.config.low:g} lengths on"
        rows += [
            row(f"{told}, one draw", f"{kind}, draws 1, steps 1", *trained),
            row(f"the same, mean over {DRAWS} draws", f"{kind}, draws {DRAWS}"),
            row("the same, one draw, 4 steps a block", f"{kind}, draws 1, steps 4"),
            row("the same, begun at 0 in place of noise", f"{kind}, no noise"),
            *(row(f"the same, one draw, after block {n}", f"{kind}, exit {n}") for n in range(NUM_BLOCKS - 1)),
        ]
    return [
        *rows,
        row(f"control: {layers} layers, end to end", "alone 0", "alone 0"),
        row(f"control: mean of {NUM_BLOCKS} such", "ensemble", *alone),
        row("the decoder whose ends the space is", "space", "space"),
    ]


def levels_of(noise: NoiseLevels) -> list[list[object]]:
    """Return of each block its levels in lengths of a row, and what they tell of a token at most."""
    cuts = noise.cuts(NUM_BLOCKS).tolist()
    return [
        [f"from {noise.config.low:g} on", n]
        + [f"{cuts[n] / sqrt(noise.width):.3f} to {cuts[n + 1] / sqrt(noise.width):.3f}"]
        + [f"{noise.most_told(cut):.3f}" for cut in cuts[n : n + 2]]
        for n in range(NUM_BLOCKS)
    ]


def report(kept: Kept, before: float | None) -> None:
    num_windows = len(next(iter(kept.losses.values())))
    head = ["model", "held-out loss", "to end to end", "%", "to its own ends", "%", "operations of training", "CPU s"]
    parts = [
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        load_line(before),
        f"{int(TOKENS * kept.scale):,} tokens each, batches of {BATCH} x {SEQ_LEN}, AdamW, rate {RATE:g}, width "
        f"{SHAPE.width}; {num_windows} held-out windows, evaluated in {kept.seconds['evaluation']:.0f} CPU seconds. "
        f"Seed {SEED} alone.",
        table(head, rows_of(kept)),
        f"Published of BlockTrain: {PUBLISHED[0]} against {PUBLISHED[1]}, "
        f"{100 * (PUBLISHED[0] / PUBLISHED[1] - 1):+.1f} %, of byte-level WikiText, by another model of four blocks. "
        "There it is held against an ordinary model: here that is the one with its own ends.",
        "Noise levels in lengths of a row, and what a noisy target tells of its token at most, nats. BlockTrain tells "
        "of sigma from 1 to 10 and, as far as we know, not in which unit; lengths of a row are our reading.",
        table(
            ["range", "block", "levels", "most told, highest", "lowest"],
            [each for n in NOISES.values() for each in levels_of(n)],
        ),
    ]
    text = whole("Blocks trained alone", "python -m benchmarks.blocks --into FILE", parts, ("safetensors",))
    print(text)
    if kept.scale == 1.0:
        (FOLDER / "blocks.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="where what is trained and found is kept")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tokens; below 1 no report is written")
    parser.add_argument("--report", action="store_true", help="train nothing, and write the report")
    options, before = parser.parse_args(), load()
    torch.set_num_threads(1)
    kept = Kept.at(options.into, options.scale)
    if not options.report:
        with tempfile.TemporaryDirectory() as folder:
            store = ShardStore(Path(folder))
            index = pack(store, CorpusConfig(), ByteTokenizer(), Path(folder))
            train_all(kept, Batches(store, index, "train", SEQ_LEN, SEED))
            if not kept.losses:
                evaluate_all(kept, Batches(store, index, "heldout", SEQ_LEN, SEED))
    if not kept.losses:
        raise SystemExit(f"{options.into} holds no losses yet: run it without --report first.")
    report(kept, before)


if __name__ == "__main__":
    main()
