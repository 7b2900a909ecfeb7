"""Stacks of two members that were trained apart, beside their controls: writes benchmarks/reports/stacks.md.

    python -m benchmarks.stacks --seeds 3                  # 22 minutes of one idle core for each seed
    python -m benchmarks.stacks --seeds 3 --into FILE      # keeps each seed there, so that what was stopped goes on
    python -m benchmarks.stacks --scale 0.01               # a trial, which is printed and not kept

Bytes of Python's standard library, in three groups of packages. A shallow model trains the ends; m1 is trained on the
shared group and the first, m2 on the shared group and the second. Then they are stacked in every way that
`weft.compose.stacks` has; so is what costs less: layers that change nothing, a copy, one member trained on. Another
two, of the same groups, go on from one backbone that has read the shared group.

A file of seeds says of which settings, text and rows they are, and seeds of others are not put beside them.
"""

import argparse
import os
import time
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks import _stacks_told as told
from benchmarks import report
from benchmarks._stacks_told import GROUPS, Row, Seed
from weft.compose.descent import Descent, DescentConfig, Draw, Trained, windows
from weft.compose.space import Space, normed
from weft.compose.stacks.align import (
    Aim,
    AlignConfig,
    ContinueConfig,
    JointConfig,
    OnewayConfig,
    StitchConfig,
    Synchronous,
    begin,
    plan,
    synchronous_flops,
)
from weft.compose.stacks.body import body, fresh, identity, vector_of
from weft.compose.stacks.grow import depth_up_scaled
from weft.compose.stacks.latents import EntropyConfig, LatentConfig, LatentDescent, replaceable
from weft.compose.stacks.sauce import SauceConfig
from weft.compose.stacks.select import matrix, scaled
from weft.compose.stacks.stack import PostConfig, PreConfig, Seam, Stack, losses_of, uniform
from weft.cost.training import flops_per_token
from weft.data.files import stdlib_files
from weft.data.rows import Batch
from weft.data.tokenizer import ByteTokenizer
from weft.ids import Digest, several
from weft.model.config import ModelConfig
from weft.model.flat import assemble, over
from weft.model.initial import initial_vector
from weft.model.transformer import SectionModule, Transformer
from weft.rng import stream
from weft.training.device import decoder
from weft.wire import digest

SEQ_LEN, BATCH = 128, 8
MEMBER_STEPS, SHALLOW_STEPS, ALIGN_STEPS, STITCH_STEPS, PER_ROUND = 1080, 720, 216, 144, 36
MEMBER_LR, ALIGN_LR, WARMUP_STEPS = 3e-3, 1.5e-3, 40
NUM_HELD = 64  # sequences of each group, of dev and of test
MAX_FILE_NBYTES = 200_000
HELD_OF = 12  # of so many files one is held out
PACKAGES = """
only1 asyncio email http json xml urllib logging concurrent multiprocessing importlib unittest xmlrpc html
only2 tkinter idlelib distutils ctypes curses turtledemo ensurepip venv wsgiref sqlite3 re dbm tomllib zoneinfo
only2 collections
"""
GROUP_OF = {name: line.split()[0] for line in PACKAGES.strip().splitlines() for name in line.split()[1:]}
TOKENIZER = ByteTokenizer()
MEMBER = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    width=128,
    ffn_width=344,
    max_seq_len=SEQ_LEN,
)
SHALLOW = msgspec.structs.replace(MEMBER, num_layers=2, is_tied=True)
MONOLITH = msgspec.structs.replace(MEMBER, num_layers=8, is_tied=True)
POST, PRE = PostConfig(), PreConfig()
NUM_DROPPED = 1  # layers of each copy, in depth up-scaling: of 4 as many as the paper's 8 of 32
UNSURE = EntropyConfig(threshold=2.0)  # nats; the mean over all positions is about 1.4


class Loop(NamedTuple):
    """A latent loop, and the rows that tell of it.

    Args:
        number: of its draws.
    """

    config: LatentConfig
    number: int
    alone: str
    stack: str


LOOPS = (
    Loop(LatentConfig(kind="prev", p0=0.05, p1=0.5), 16, told.PREV, told.PREV_STACK),
    Loop(LatentConfig(kind="prev", select=UNSURE), 22, told.PREV_UNSURE, told.PREV_UNSURE_STACK),
    Loop(LatentConfig(kind="same", select=UNSURE), 23, told.SAME_UNSURE, told.SAME_UNSURE_STACK),
    Loop(LatentConfig(kind="same"), 17, told.SAME, told.SAME_STACK),
)


# --- text ---


class Held(NamedTuple):
    """Held-out text: windows with two tokens more, a third of each group."""

    tokens: Tensor

    def batch(self, ahead: int = 1) -> Batch:
        """Return it with the tokens so far ahead as targets."""
        return Batch(self.tokens[:, :SEQ_LEN], self.tokens[:, ahead : ahead + SEQ_LEN])


class Corpus(NamedTuple):
    train: dict[str, Tensor]
    dev: Held
    test: Held

    def of(self, *groups: str) -> Tensor:
        return torch.cat([self.train[group] for group in groups])


def corpus(num_held: int) -> Corpus:
    """Return the standard library, its files in groups; some of each group are held out, the same ones always."""
    parts, end = dict[tuple[str, bool], list[NDArray[np.uint16]]](), np.array([TOKENIZER.end_of_text], dtype=np.uint16)
    for file in stdlib_files():
        group = GROUP_OF.get(file.name.split("/")[0], "shared")
        is_held = int(digest(file.name.encode()), 16) % HELD_OF == 0
        written = np.frombuffer(file.path.read_bytes()[:MAX_FILE_NBYTES], dtype=np.uint8)
        parts.setdefault((group, is_held), []).extend((written.astype(np.uint16), end))
    texts = {key: torch.from_numpy(np.concatenate(each).astype(np.int16)) for key, each in parts.items()}
    held = [[_windows(texts[group, True], num_held, f"{name} {group}") for group in GROUPS] for name in ("dev", "test")]
    return Corpus({group: texts[group, False] for group in GROUPS}, *(Held(torch.cat(each)) for each in held))


def configured(texts: Corpus) -> Digest:
    """Return what names all that a seed depends on, but for its number and the scale: settings, text, which rows."""
    training = DescentConfig(steps=ALIGN_STEPS, lr=ALIGN_LR, warmup_steps=WARMUP_STEPS)
    aligned = [kind(training=training) for kind in (StitchConfig, OnewayConfig, JointConfig, ContinueConfig)]
    sauce = SauceConfig(training=training, per_round=PER_ROUND)
    steps = (MEMBER_STEPS, SHALLOW_STEPS, ALIGN_STEPS, STITCH_STEPS, MEMBER_LR)
    settings = (SEQ_LEN, BATCH, *steps, NUM_DROPPED, MEMBER, SHALLOW, MONOLITH, *aligned, sauce, *LOOPS)
    parts = [*texts.train.values(), texts.dev.tokens, texts.test.tokens]
    return digest(msgspec.json.encode((settings, told.NAMES, [digest(part.numpy().tobytes()) for part in parts])))


def _windows(tokens: Tensor, num: int, name: str) -> Tensor:
    starts = stream(4242, "held", name).integers(len(tokens) - SEQ_LEN - 1, size=num)
    return tokens[torch.from_numpy(starts)[:, None] + torch.arange(SEQ_LEN + 2)].long()


# --- one seed ---


class Decoder(Descent):
    """Plain training of a whole decoder: of the shallow one, and of the monolith."""

    def __init__(self, training: DescentConfig, config: ModelConfig, seed: int, draw: Draw) -> None:
        with torch.device("meta"):
            model = Transformer(config)
        self.flat = over(model, initial_vector(config, seed))
        super().__init__(training, draw, {"model": Trained.of(self.flat)})

    def _loss(self, number: int) -> Tensor:
        batch = self._draw(number)
        return self.flat.module.loss(batch.tokens, batch.targets)

    def model(self) -> Transformer:
        return assemble(self.flat.config, self.flat.vector)


class Made(NamedTuple):
    """A stack, and what it took so far, in steps of one member (u)."""

    stack: Stack
    cost_u: float


class Lab:
    """What all rows of a seed share: text, steps, and where rows go.

    Args:
        say: told of each row.
    """

    def __init__(self, texts: Corpus, seed: int, scale: float, say: Callable[[str, Row], None]) -> None:
        self.rows = dict[str, Row]()
        self.texts = texts
        self.seed = seed
        self.scale = scale
        self._say = say

    def steps(self, num: int) -> int:
        return max(4, round(num * self.scale))

    def training(self, num: int, lr: float = ALIGN_LR) -> DescentConfig:
        """Return how so many steps are made, which `steps` has found."""
        return DescentConfig(steps=num, lr=lr, warmup_steps=min(WARMUP_STEPS, num // 4))

    def draw(self, number: int, *groups: str) -> Draw:
        return windows(self.texts.of(*(groups or GROUPS)), SEQ_LEN, BATCH, 1000 * self.seed + number)

    def aligned(self, config: AlignConfig, made: Made, number: int, *groups: str) -> Made:
        alignment = begin(config, made.stack, self.draw(number, *groups))
        alignment.run()
        return Made(alignment.stack, made.cost_u + plan(config, made.stack, BATCH, SEQ_LEN).flops / u(made.stack.space))

    def tell(self, name: str, made: Made, ahead: int = 1, note: str = "") -> Made:
        """Note the losses of a stack, and what its uppermost member adds."""
        batch, last = self.texts.test.batch(ahead), len(made.stack.bodies) - 1
        losses = made.stack.losses(batch)
        adds = float((losses - made.stack.losses(batch, exit=last - 1)).mean()) if last else None
        self.note(name, losses, made.cost_u, adds, note)
        return made

    def note(self, name: str, losses: Tensor, cost_u: float, adds: float | None = None, note: str = "") -> None:
        told_of = tuple(round(float(each), 5) for each in losses)
        self.rows[name] = Row(losses=told_of, cost_u=cost_u, adds=adds, note=note)
        self._say(name, self.rows[name])


def u(space: Space) -> float:
    """Return the operations of one step of one member: the unit of cost."""
    one = Stack(space, (body(MEMBER, fresh(MEMBER, 0)),))
    return plan(ContinueConfig(training=DescentConfig(steps=1, warmup_steps=0)), one, BATCH, SEQ_LEN).flops


def decoder_u(config: ModelConfig, steps: int, space: Space) -> float:
    return steps * BATCH * SEQ_LEN * flops_per_token(decoder(config), SEQ_LEN) / u(space)


def play(texts: Corpus, seed: int, scale: float, say: Callable[[str, Row], None]) -> Seed:
    """Return what a seed finds: every row of the table."""
    began, lab = time.process_time(), Lab(texts, seed, scale, say)
    shallow = Decoder(lab.training(lab.steps(SHALLOW_STEPS), MEMBER_LR), SHALLOW, 100 * seed, lab.draw(0))
    shallow.run()
    space = Space.of(shallow.model(), TOKENIZER.digest)
    ends_u = decoder_u(SHALLOW, shallow.num_steps, space)
    lab.note(told.SHALLOW, _losses(shallow.model(), texts.test.batch()), ends_u)
    m1 = lab.tell(told.M1, _member(lab, Made(Stack(space, (_fresh(seed, 1),)), ends_u), 1, "only1"))
    m2 = lab.tell(told.M2, _member(lab, Made(Stack(space, (_fresh(seed, 2),)), ends_u), 2, "only2"))
    parts = Parts(lab, space, m1, m2, ends_u)
    best = min((told.M1, m1), (told.M2, m2), key=lambda each: float(each[1].stack.losses(texts.dev.batch()).mean()))
    _references(parts, told.ENSEMBLE, told.SOUP)
    _naive(parts)
    dearest = _looped(parts)
    _asynchronous(parts)
    _joint(parts)
    _of_one_backbone(parts)
    _continued(parts, best[1], dearest)
    _monolith(parts, dearest)
    return Seed(rows=lab.rows, best=best[0], geometry=_geometry(parts), cpu_s=time.process_time() - began)


class Parts(NamedTuple):
    """Two members that were trained apart.

    Args:
        ends_u: what both began with: of the ends, and of a backbone where they share one.
    """

    lab: Lab
    space: Space
    m1: Made
    m2: Made
    ends_u: float

    @property
    def apart_u(self) -> float:
        return self.m1.cost_u + self.m2.cost_u - self.ends_u

    def on(self, lower: SectionModule, upper: SectionModule, cost_u: float, *, is_raw: bool = False) -> Made:
        return Made(Stack(self.space, (lower, upper), uniform(PRE if is_raw else POST, 2)), cost_u)

    def both(self, *, is_raw: bool = False) -> Made:
        return self.on(self.lower, self.upper, self.apart_u, is_raw=is_raw)

    def with_identity(self, *, is_raw: bool = False) -> Made:
        """Return m1 with layers that change nothing yet: what a stack has to be better than."""
        layers = body(MEMBER, identity(MEMBER, 100 * self.lab.seed + 9))
        return self.on(self.lower, layers, self.m1.cost_u, is_raw=is_raw)

    @property
    def lower(self) -> SectionModule:
        return self.m1.stack.bodies[0]

    @property
    def upper(self) -> SectionModule:
        return self.m2.stack.bodies[0]


def _fresh(seed: int, number: int) -> SectionModule:
    return body(MEMBER, fresh(MEMBER, 100 * seed + number))


def _member(lab: Lab, begun: Made, number: int, group: str) -> Made:
    config = ContinueConfig(training=lab.training(lab.steps(MEMBER_STEPS), MEMBER_LR))
    return lab.aligned(config, begun, number, "shared", group)


def _references(parts: Parts, ensemble: str, mean_weights: str) -> None:
    """Tell of what two members come to without a stack, in rows of these names."""
    lab, batch = parts.lab, parts.lab.texts.test.batch()
    logs = [made.stack.logits(batch.tokens).log_softmax(-1) for made in (parts.m1, parts.m2)]
    lab.note(ensemble, losses_of(torch.logaddexp(*logs) - log(2), batch.targets), parts.apart_u)
    soup = body(MEMBER, (vector_of(parts.lower) + vector_of(parts.upper)) / 2)
    lab.tell(mean_weights, Made(Stack(parts.space, (soup,)), parts.apart_u))


def _naive(parts: Parts) -> None:
    lab, both = parts.lab, parts.both()
    lab.tell(told.NAIVE, both)
    lab.tell(told.RAW, parts.both(is_raw=True))
    lab.tell(told.AFTER_NEXT, both, ahead=2)
    lab.tell(told.M1_AFTER_NEXT, parts.m1, ahead=2)
    for name, seam in (
        (told.CUT_FIRST, Seam(handover=POST, cut_first=1)),
        (told.CUT_LAST, Seam(handover=POST, cut_last=1)),
    ):
        lab.tell(name, Made(Stack(parts.space, both.stack.bodies, (seam,)), parts.apart_u))
    lab.tell(told.TWICE, parts.on(parts.lower, parts.lower, parts.m1.cost_u))
    members = {"m1": parts.lower, "m2": parts.upper}
    pairs = matrix(parts.space, members, lab.texts.dev.batch())
    alpha = pairs.pairs["m1", "m2"].alpha
    tuned = scaled(parts.space, members, ("m1", "m2"), (alpha,))
    lab.tell(told.TUNED, Made(tuned, parts.apart_u), note=f"{alpha:g}")


def _looped(parts: Parts) -> Made:
    """Tell of latent loops; return the dearest of all stacks."""
    lab, steps = parts.lab, parts.lab.steps(ALIGN_STEPS)
    loop_u = 2.0 * steps  # two passes
    for config, number, alone, stack in LOOPS:
        member = (MEMBER, vector_of(parts.upper))
        loop = LatentDescent(
            config, lab.training(steps), parts.space, member, lab.draw(number, "shared", "only2"), lab.seed
        )
        loop.run()
        same = body(MEMBER, loop.vector)  # at last that of the last, of all positions
        lab.tell(alone, Made(Stack(parts.space, (same,)), parts.m2.cost_u + loop_u), note=_replaced(parts, config))
        lab.tell(stack, parts.on(parts.lower, same, parts.apart_u + loop_u))
    lab.tell(told.SAME_TWICE, Made(Stack(parts.space, (same,), loops=(2,)), parts.m2.cost_u + loop_u))
    begun = parts.on(parts.lower, same, parts.apart_u + loop_u)
    return lab.tell(told.LOOP_JOINT, lab.aligned(JointConfig(training=lab.training(steps)), begun, 18))


def _replaced(parts: Parts, config: LatentConfig) -> str:
    """Say of how many positions m2 is unsure, where a loop asks for those."""
    if not isinstance(config.select, EntropyConfig):
        return ""
    batch = parts.lab.texts.dev.batch()
    unsure = replaceable(config, parts.space, parts.m2.stack.exits(batch.tokens)[-1], batch)
    return f"{100 * float(unsure.float().mean()):.0f} % of positions"


def _asynchronous(parts: Parts) -> None:
    lab, training, both = parts.lab, parts.lab.training(parts.lab.steps(ALIGN_STEPS)), parts.both()
    half = lab.training(lab.steps(ALIGN_STEPS // 2))
    stitch = StitchConfig(training=lab.training(lab.steps(STITCH_STEPS)))
    lab.tell(told.STITCH, lab.aligned(stitch, both, 11))
    oneway = lab.tell(told.ONEWAY, lab.aligned(OnewayConfig(training=training), both, 12))
    lab.tell(told.ONEWAY_IDENTITY, lab.aligned(OnewayConfig(training=training), parts.with_identity(), 12))
    per_round = lab.steps(PER_ROUND)
    sauce = lab.tell(told.SAUCE, lab.aligned(SauceConfig(training=training, per_round=per_round), both, 13))
    lab.tell(told.SAUCE_ALONE, Made(Stack(parts.space, sauce.stack.bodies[:1]), sauce.cost_u))
    aim = Aim(members={0}, weights={1: 1.0, 0: SauceConfig(training=training).grounding})
    twin = Synchronous(training, both.stack, lab.draw(13), aim)
    twin.run()
    twin_u = training.steps * BATCH * SEQ_LEN * synchronous_flops(aim, both.stack, SEQ_LEN) / u(parts.space)
    lab.tell(told.TWIN, Made(twin.stack, parts.apart_u + twin_u))
    again = lab.aligned(SauceConfig(training=half, per_round=per_round), oneway, 14)
    lab.tell(told.ONEWAY_SAUCE, again)
    lab.tell(told.ONEWAY_SAUCE_ONEWAY, lab.aligned(OnewayConfig(training=half), again, 15))


def _joint(parts: Parts) -> None:
    lab = parts.lab
    config = JointConfig(training=lab.training(lab.steps(ALIGN_STEPS)))
    for name, made in (
        (told.JOINT, parts.both()),
        (told.JOINT_RAW, parts.both(is_raw=True)),
        (told.JOINT_IDENTITY, parts.with_identity()),
        (told.JOINT_RAW_IDENTITY, parts.with_identity(is_raw=True)),
        (told.JOINT_COPY, parts.on(parts.lower, parts.lower, parts.m1.cost_u)),
    ):
        lab.tell(name, lab.aligned(config, made, 10))
    every_exit = JointConfig(training=config.training, exits="all")
    lab.tell(told.JOINT_EXITS, lab.aligned(every_exit, parts.both(), 10))
    grown = body(*depth_up_scaled(MEMBER, vector_of(parts.lower), NUM_DROPPED))
    begun = Made(Stack(parts.space, (grown,)), parts.m1.cost_u)
    lab.tell(told.UP_SCALED, lab.aligned(ContinueConfig(training=config.training), begun, 10))


def _of_one_backbone(parts: Parts) -> None:
    """Train two members that go on from one backbone, in as many steps as each of the others had; then stack them."""
    lab = parts.lab
    half = ContinueConfig(training=lab.training(lab.steps(MEMBER_STEPS // 2), MEMBER_LR))
    begun = Made(Stack(parts.space, (_fresh(lab.seed, 3),)), parts.ends_u)
    backbone = lab.aligned(half, begun, 3, "shared")
    b1 = lab.tell(told.BRANCH1, lab.aligned(half, backbone, 4, "shared", "only1"))
    b2 = lab.tell(told.BRANCH2, lab.aligned(half, backbone, 5, "shared", "only2"))
    branches = Parts(lab, parts.space, b1, b2, backbone.cost_u)
    _references(branches, told.BRANCH_ENSEMBLE, told.BRANCH_SOUP)
    lab.tell(told.BRANCH_NAIVE, branches.both())
    config = JointConfig(training=lab.training(lab.steps(ALIGN_STEPS)))
    lab.tell(told.BRANCH_JOINT, lab.aligned(config, branches.both(), 10))
    lab.tell(told.BRANCH_IDENTITY, lab.aligned(config, branches.with_identity(), 10))


def _continued(parts: Parts, best: Made, dearest: Made) -> None:
    """Train the best single on, with as much compute as a stack takes to be aligned."""
    lab = parts.lab
    joint_u = lab.rows[told.JOINT].cost_u - parts.apart_u
    for name, spent_u in ((told.CONTINUED, joint_u), (told.CONTINUED_ON, dearest.cost_u - parts.apart_u)):
        lab.tell(name, lab.aligned(ContinueConfig(training=lab.training(round(spent_u))), best, 21))


def _monolith(parts: Parts, dearest: Made) -> None:
    """Train all layers at once, with the compute of all that the dearest stack took."""
    lab = parts.lab
    steps = round(dearest.cost_u / decoder_u(MONOLITH, 1, parts.space))
    whole = Decoder(lab.training(steps, MEMBER_LR), MONOLITH, 100 * lab.seed + 5, lab.draw(20))
    whole.run()
    losses = _losses(whole.model(), lab.texts.test.batch())
    lab.note(told.MONOLITH, losses, decoder_u(MONOLITH, steps, parts.space))


@torch.no_grad()
def _losses(model: Transformer, batch: Batch) -> Tensor:
    return losses_of(model(batch.tokens), batch.targets)


def _geometry(parts: Parts) -> dict[str, float]:
    """Return how the residual stream of a member lies to what goes into the next."""
    tokens = parts.lab.texts.test.tokens
    now, then = tokens[:, :SEQ_LEN], tokens[:, 1 : SEQ_LEN + 1]
    one, two = (made.stack.exits(now)[-1] for made in (parts.m1, parts.m2))
    out = normed(one, parts.space.norm_eps)
    near = {
        "cosine to what the next token goes in as": parts.space.begin(then),
        "to what the same token goes in as": parts.space.begin(now),
        "to what leaves m2": two,
    }
    found = {"root mean square of what leaves m1": float(one.square().mean(-1).sqrt().mean())}
    return found | {name: float(cosine_similarity(out, other, dim=-1).mean()) for name, other in near.items()}


# --- the report ---

ABOUT = f"""
Python's standard library, in bytes ({TOKENIZER.vocab_size} tokens: the last ends a file), its files in three groups by
package; one file of {HELD_OF} is held out. A shallow model of 2 layers trains the ends ({SHALLOW_STEPS} steps). m1 (on
shared and only1) and m2 (on shared and only2) have 4 layers of width {MEMBER.width} each, {MEMBER_STEPS} steps of
{BATCH} x {SEQ_LEN} tokens and other seeds; b1 and b2 have half of their steps in common, on shared alone. Alignments
take {ALIGN_STEPS} steps on all text. AdamW, peak rates
{MEMBER_LR:g} and {ALIGN_LR:g}. Losses are nats per byte on {3 * NUM_HELD} sequences that are the same for all seeds;
what is tuned is tuned on as many others. u is one step of one member, in operations.

*less best single*: paired, mean and standard error over sequences; the best single is the better member on dev. *upper
adds*: the loss of the stack less that of the exit below its uppermost member. A stack is never told without its
controls.
""".strip()


class Kept(msgspec.Struct, frozen=True):
    """What a file holds: for which scale, and the seeds that are through.

    Args:
        configured: what names all else that they depend on; older files say nothing of it, and are of something else.
    """

    scale: float
    seeds: dict[int, Seed]
    configured: str = ""


def sections(found: told.Seeds, before: float | None) -> list[str]:
    cpu = " / ".join(f"{seed.cpu_s / 60:.1f}" for seed in found.values())
    return [
        ABOUT,
        f"{len(found)} seeds, {cpu} CPU minutes of one thread. {report.load_line(before)}",
        told.rows(found),
        "## Repairs\n\n" + told.repairs(found),
        f"## Usefulness\n\nDifferences below {told.TIE} nats, or two standard errors, are ties. {told.claims(found)}",
        told.usefulness(found),
        "Training members takes as long as the slower one where they train at once; the ends before, and the alignment "
        f"after, come one after the other. Geometry: {told.geometry(found)}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--scale", type=float, default=1.0, help="share of all steps and held-out sequences")
    parser.add_argument("--into", type=Path, help="a file that keeps each seed that is through")
    options, before = parser.parse_args(), report.load()
    torch.set_num_threads(1)
    texts = corpus(max(4, round(NUM_HELD * options.scale)))
    now = configured(texts)
    found = kept_seeds(options.into, options.scale, now)
    sizes = ", ".join(f"{group} {len(each) / 1e6:.2f}" for group, each in texts.train.items())
    print(f"million bytes to train on: {sizes}", flush=True)
    for number in range(1, options.seeds + 1):
        if number not in found:
            found[number] = play(texts, number, options.scale, _say)
            if options.into is not None:
                keep(options.into, Kept(options.scale, found, now))
    chosen = {number: found[number] for number in range(1, options.seeds + 1)}
    title, command = "Stacks of members trained apart", "python -m benchmarks.stacks"
    if options.scale == 1:
        report.write("stacks", title, command, sections(chosen, before))
    else:
        print(report.whole(title, command, sections(chosen, before)))


def kept_seeds(path: Path | None, scale: float, now: str) -> dict[int, Seed]:
    """Return the seeds that a file has; none where there is no file.

    Args:
        now: what names the settings, text and rows of this program.

    Raises:
        SystemExit: they are of another scale, or of other settings.
    """
    if path is None or not path.exists():
        return {}
    kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    if kept.scale != scale:
        raise SystemExit(f"{path} holds seeds of scale {kept.scale:g}, and {scale:g} is asked for. Name another file.")
    if kept.configured != now:
        raise SystemExit(
            f"{path} holds {several(len(kept.seeds), 'seed')} of other settings, other text or other rows than this "
            "program has now, and the mean of both would say nothing. Name another file with --into, or move this one "
            "away: all seeds are made anew."
        )
    return kept.seeds


def keep(path: Path, kept: Kept) -> None:
    """Write seeds in the file's place."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
    os.replace(beside, path)


def _say(name: str, row: Row) -> None:
    print(f"{sum(row.losses) / len(row.losses):7.3f}  {row.cost_u:7,.0f} u  {name}", flush=True)


if __name__ == "__main__":
    main()
