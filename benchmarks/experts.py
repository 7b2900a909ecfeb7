"""Four experts that never hear of each other, against one model of as much computing. Writes reports/experts.md.

    python -m benchmarks.experts --into FILE                 # half an hour of one core a seed; goes on where it stopped
    python -m benchmarks.experts --into FILE --report        # writes the report of what is there
    python -m benchmarks.experts --into FILE --scale 0.01    # a hundredth of the steps: whether it works

Text is of four kinds, up to 5 MB of each: source of Python's own library, manual pages, licences, and settings in JSON
and TOML. A kind that this machine has not is left out, and the report says so. Clusters are found by tf-idf and
balanced k-means, nobody told of kinds. A seed model is trained on all, and branched: each expert goes on alone, on one
cluster. Then they are asked together (ensembles), averaged (soups), and made one model with a router (mixtures), which
is trained for a little on text of all. The one model beside them goes on from the same seed model on all text, with as
many steps as the four experts and the mixture took together: so it has had the most computing of all rows.

A cost of 1 is that of a step of one expert; a mixture's step costs as many as it has parameters that compute a token,
frozen or not, by those of an expert. Losses are nats per byte on held-out documents that no row has seen, up to four
windows of each. A difference is that to the one model, paired by window; its error is that of the mean over documents,
since windows of one document are alike. Soups and priors are chosen by other held-out documents. Where a prior is of
the kind, it is told which kind a text is of; no other row is.

A share of the gain is how far a row has come from the seed model to the one model: 1 is all the way. Its error is
paired by document, too. The best composed row is to reach 0.97.
"""

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.report import FOLDER, load, load_line, table, whole
from benchmarks.rig.flat import two_groups
from weft import rng, wire
from weft.compose.experts import soup
from weft.compose.experts.clusters import Clusters
from weft.compose.experts.ensemble import (
    Distance,
    Posterior,
    TopK,
    Uniform,
    Weighting,
    cached_prior,
    likelihoods,
    losses,
)
from weft.compose.experts.mixture import STAGES, Mixture, MixtureConfig, Stage, mix, mixture_layout, over
from weft.compose.experts.soup import Ingredient
from weft.compose.experts.split import file_of, find_clusters, read_clusters, split_documents
from weft.data.corpus import JsonlSource, StdlibSource, documents, rank
from weft.data.documents import Document
from weft.data.files import opened
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError
from weft.model import flat
from weft.model.config import named
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.sync.method.schedule import CosineConfig, lr

SEEDS = (1, 2, 3)
EXPERTS, SEQ_LEN, BATCH = 4, 256, 4
SEED_STEPS, EXPERT_STEPS = 1000, 1500
STAGE_STEPS: dict[Stage, int] = {"router": 300, "ends": 100, "attention": 200, "all": 300}
SEED_LR, LR = 3e-3, 1.5e-3
HELDOUT = 0.1
WINDOWS, MOST_TESTED = 4, 160  # of a document; of a kind
KIND_NBYTES, FILE_LETTERS = 5_000_000, 1 << 15
LEAST_NBYTES = 200_000  # of a kind: less is none
CONFIG = named("nano", ByteTokenizer.vocab_size, SEQ_LEN)
PLACES = {  # of each kind: folders, and how its files' names end there
    "manuals": tuple((f"/usr/share/man/man{number}", "") for number in range(1, 10)),
    "licences": (("/usr/share/common-licenses", ""), ("/usr/share/doc", "/copyright")),
    "settings": tuple(
        (folder, ending) for folder in ("/usr/share", "/usr/lib", sys.base_prefix) for ending in (".json", ".toml")
    ),
}
REFERENCE, START = "one model of as much computing", "the seed model"
TOLD_THE_KIND = "ensemble, posterior, prior of the kind"  # which no other row is told: it is not in question
COMPOSED = ("ensemble", "soup", "mixture")  # how the names of composed rows begin
BAR = 0.97  # of the one model's gain, for the best of them
Draw = Callable[[int], tuple[Tensor, Tensor]]  # of a step: tokens and targets


@dataclass(frozen=True, kw_only=True)
class Window:
    """Held-out text.

    Args:
        document: where it is from; its kind stands before the colon.
    """

    document: str
    tokens: tuple[int, ...]

    @property
    def kind(self) -> str:
        return self.document.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What comes of one seed.

    Args:
        documents: of each window that is tested.
        losses: of each row, one a window.
        costs: of each row: all that it was trained by, and for each token that it reads.
        clusters: bytes of each kind in each cluster.
        taken: what the greedy soup took.
    """

    seed: int
    scale: float
    documents: list[str]
    losses: dict[str, list[float]]
    costs: dict[str, tuple[float, float]]
    clusters: list[dict[str, int]]
    taken: list[str]


# --- text ---


def texts_of(kind: str) -> Iterator[Document]:
    """Yield files of a kind that are text, in an order of no meaning, each cut to 32 KiB, and none twice."""
    if kind == "python":
        modules = documents(StdlibSource(), Path())
        found: Iterable[Document] = sorted(modules, key=lambda each: rng.order_key("experts", each.name))
    else:
        named_so = (
            os.path.join(at, name)
            for folder, ending in PLACES[kind]
            for at, _, names in os.walk(folder)
            for name in names
            if os.path.join(at, name).endswith(ending)
        )
        paths = set(map(os.path.realpath, named_so))
        found = _read(sorted(paths, key=lambda path: rng.order_key("experts", path)))
    seen = set[str]()
    for document in found:
        text = document.text[:FILE_LETTERS]
        if text and (digest := wire.digest(text.encode(errors="replace"))) not in seen:
            seen.add(digest)
            yield Document(document.name, text)


def _read(paths: Iterable[str]) -> Iterator[Document]:
    for path in paths:
        try:
            with opened(Path(path)) as stream:
                text = stream.read().decode()
        except (DataError, UnicodeDecodeError, OSError):
            continue  # a folder, or no text: the kind is of what can be read
        if "\0" not in text:
            yield Document(path, text)


def gather(folder: Path, nbytes: int) -> JsonlSource:
    """Write a file of JSON lines for each kind, unless they are there; return them all as a source."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("python", *PLACES):
        file, beside, num = folder / f"{kind}.jsonl", folder / f"{kind}.new", 0
        if file.exists():
            continue
        with beside.open("w", encoding="utf-8") as out:
            for document in texts_of(kind):
                out.write(json.dumps({"text": document.text}) + "\n")
                num += len(document.text)
                if num >= nbytes:
                    break
        if num >= min(LEAST_NBYTES, nbytes // 2):
            beside.replace(file)
        else:
            beside.unlink()
    return JsonlSource(paths=("*.jsonl",))


def lines(file: Path) -> Iterator[Document]:
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            yield Document(**json.loads(line))


def tokens_of(file: Path) -> Tensor:
    """Return the documents of a file, one after the other."""
    end = np.array([ByteTokenizer.end_of_text], np.uint32)
    parts = [part for document in lines(file) for part in (ByteTokenizer().encode(document.text), end)]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def heldout_windows(folder: Path) -> tuple[list[Window], list[Window]]:
    """Return windows by which things are chosen, and windows that are tested: of other documents."""
    chosen, tested = list[Window](), defaultdict[str, list[Window]](list)
    for cluster in range(EXPERTS):
        for document in lines(folder / file_of(cluster, "heldout")):
            ids = ByteTokenizer().encode(document.text).tolist()
            num = min(WINDOWS, len(ids) // (SEQ_LEN + 1))
            for start in np.linspace(0, len(ids) - SEQ_LEN - 1, num, dtype=int).tolist():
                window = Window(document=document.name, tokens=tuple(ids[start : start + SEQ_LEN + 1]))
                (chosen if rank(f"chosen {document.name}") < 1 / 3 else tested[window.kind]).append(window)
    by_name = partial(sorted, key=lambda window: rng.order_key("tested", window.document))
    return by_name(chosen)[:MOST_TESTED], [
        each for kind in sorted(tested) for each in by_name(tested[kind])[:MOST_TESTED]
    ]


def drawn(ids: Tensor, seed: int, name: str) -> Draw:
    """Return how windows of a text are drawn for a step."""

    def draw(step: int) -> tuple[Tensor, Tensor]:
        starts = rng.stream(seed, name, step).integers(0, len(ids) - SEQ_LEN, BATCH)
        rows = torch.stack([ids[start : start + SEQ_LEN + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    return draw


# --- training ---


def train(
    decayed: Sequence[Tensor], others: Sequence[Tensor], step_loss: Callable[[int], Tensor], num_steps: int, peak: float
) -> None:
    """Make steps of AdamW along a cosine.

    Args:
        decayed: parameters whose gradients are there and are added to, as those of `others`.
        step_loss: of a step, which is counted from 0.
    """
    groups = [{"params": list(decayed), "weight_decay": 0.1}, {"params": list(others), "weight_decay": 0.0}]
    parts = [*decayed, *others]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    schedule = CosineConfig(lr=peak, warmup_tokens=max(num_steps // 20, 1), total_tokens=max(num_steps, 2))
    for step in range(num_steps):
        for part in parts:
            assert part.grad is not None
            part.grad.zero_()
        step_loss(step).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr(schedule, step + 1)
        optimizer.step()


def trained(vector: Tensor, draw: Draw, num_steps: int, peak: float) -> Tensor:
    """Return what a model's vector has become."""
    with torch.device("meta"):
        module = Transformer(CONFIG)
    model = flat.over(module, vector.clone())
    decayed, others = two_groups(model)
    train([decayed], [others], lambda step: module.loss(*draw(step)), num_steps, peak)
    return model.vector


def trained_mixture(config: MixtureConfig, vector: Tensor, draws: Mapping[Stage, Draw], scale: float) -> Tensor:
    """Return what a mixture's vector has become after some stages, one after the other."""
    vector = vector.clone()
    module, _ = over(config, vector)
    module.train()
    for stage, draw in draws.items():
        module.thaw(stage)
        parts = [each for each in module.parameters() if each.requires_grad]
        decayed, others = ([each for each in parts if (each.dim() == 2) == has_decay] for has_decay in (True, False))
        train(decayed, others, partial(_mixture_loss, module, draw), steps(STAGE_STEPS[stage], scale), LR / 2)
    return vector


def _mixture_loss(module: Mixture, draw: Draw, step: int) -> Tensor:
    return module.trained_loss(*draw(step))


def steps(num: int, scale: float) -> int:
    return max(round(num * scale), 2)


def kept(file: Path, make: Callable[[], Tensor]) -> Tensor:
    """Return the vector of a file; made, and kept there, where there is none."""
    if not file.exists():
        beside = file.with_suffix(".new")
        make().numpy().astype("<f4").tofile(beside)
        os.replace(beside, file)
        print(f"made {file.name}", flush=True)
    return torch.from_numpy(np.fromfile(file, "<f4").astype(np.float32))


# --- one seed ---


def run(seed: int, scale: float, place: Path) -> Found:
    source = gather(place / "texts", int(KIND_NBYTES * min(1.0, max(scale, 0.05))))
    folder = place / f"seed-{seed}"
    if not (folder / "clusters").exists():
        folder.mkdir(parents=True, exist_ok=True)
        clusters = find_clusters(source, place / "texts", HELDOUT, EXPERTS, seed)
        split_documents(source, place / "texts", HELDOUT, clusters, folder / "clusters")
    clusters = read_clusters(folder / "clusters")
    own = [tokens_of(folder / "clusters" / file_of(number, "train")) for number in range(EXPERTS)]
    every = drawn(torch.cat(own), seed, "all")

    seed_steps, expert_steps = steps(SEED_STEPS, scale), steps(EXPERT_STEPS, scale)
    start = kept(folder / "seed.f32", lambda: trained(initial_vector(CONFIG, seed), every, seed_steps, SEED_LR))
    parent = wire.digest(start.numpy().astype("<f4").tobytes())
    experts = [
        Ingredient(
            f"expert {number}",
            kept(
                folder / f"expert-{number}.f32",
                partial(trained, start, drawn(ids, seed, f"expert {number}"), expert_steps, LR),
            ),
            parent,
        )
        for number, ids in enumerate(own)
    ]
    config, fresh = mix(CONFIG, experts, seed)
    draws: dict[Stage, Draw] = {stage: drawn(torch.cat(own), seed, stage) for stage in STAGES}
    alone: dict[Stage, Draw] = {"router": draws.pop("router")}
    routed = kept(folder / "routed.f32", partial(trained_mixture, config, fresh, alone, scale))
    thawed = kept(folder / "thawed.f32", partial(trained_mixture, config, routed, draws, scale))

    experts_cost = float(seed_steps + EXPERTS * expert_steps)
    stage_cost = {stage: steps(STAGE_STEPS[stage], scale) * active_share(config) for stage in STAGES}
    mixture_cost = experts_cost + sum(stage_cost.values())
    beyond = drawn(torch.cat(own), seed, "one")
    one = kept(folder / "one.f32", lambda: trained(start, beyond, round(mixture_cost) - seed_steps, LR))

    chosen, tested = heldout_windows(folder / "clusters")
    greedy = soup.greedy(experts, lambda vector: mean(of_model(vector, chosen)))
    rows: dict[str, list[float]] = {REFERENCE: of_model(one, tested), START: of_model(start, tested)}
    costs = {REFERENCE: (mixture_cost, 1.0), START: (float(seed_steps), 1.0)}
    for each in experts:
        rows[each.name], costs[each.name] = of_model(each.vector, tested), (float(seed_steps + expert_steps), 1.0)
    for name, found in ensembles(experts, clusters, chosen, tested).items():
        rows[name] = found
        costs[name] = (experts_cost, {"top 1": 1.0, "top 2": 2.0}.get(name[-5:], 4.0) if "distance" in name else 4.0)
    rows["soup, uniform"], costs["soup, uniform"] = of_model(soup.uniform(experts), tested), (experts_cost, 1.0)
    rows["soup, greedy"], costs["soup, greedy"] = of_model(greedy.vector, tested), (experts_cost, 1.0)
    rows["mixture, router alone"] = of_mixture(config, routed, tested)
    costs["mixture, router alone"] = (experts_cost + stage_cost["router"], active_share(config))
    rows["mixture, thawed"] = of_mixture(config, thawed, tested)
    costs["mixture, thawed"] = (mixture_cost, active_share(config))
    return Found(
        seed=seed,
        scale=scale,
        documents=[window.document for window in tested],
        losses={name: [round(loss, 6) for loss in found] for name, found in rows.items()},
        costs=costs,
        clusters=[kinds_in(folder / "clusters" / file_of(number, "train")) for number in range(EXPERTS)],
        taken=list(greedy.names),
    )


def active_share(config: MixtureConfig) -> float:
    """Return how many parameters compute a token, by those of one expert."""
    idle = config.num_experts - config.top_k
    own = sum(span.num for span in mixture_layout(config) if ".ffn.experts.0." in span.name)
    return (mixture_layout(config).num_parameters - idle * own) / flat.layout(CONFIG).num_parameters


def kinds_in(file: Path) -> dict[str, int]:
    found = defaultdict[str, int](int)
    for document in lines(file):
        found[document.name.partition(".")[0]] += len(document.text.encode())
    return dict(found)


# --- losses ---


def batches(windows: Sequence[Window], size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(windows), size):
        rows = torch.tensor([window.tokens for window in windows[start : start + size]])
        yield rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def of_logits(model: Callable[[Tensor], Tensor], windows: Sequence[Window]) -> list[float]:
    found = list[float]()
    for tokens, targets in batches(windows):
        found += (
            cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
            .view(targets.shape)
            .mean(1)
            .tolist()
        )
    return found


def of_model(vector: Tensor, windows: Sequence[Window]) -> list[float]:
    return of_logits(flat.assemble(CONFIG, vector), windows)


def of_mixture(config: MixtureConfig, vector: Tensor, windows: Sequence[Window]) -> list[float]:
    return of_logits(over(config, vector)[0].requires_grad_(False).eval(), windows)


def ensembles(
    experts: Sequence[Ingredient], clusters: Clusters, chosen: Sequence[Window], tested: Sequence[Window]
) -> dict[str, list[float]]:
    """Return losses of each way to ask experts together."""
    models = [flat.assemble(CONFIG, each.vector) for each in experts]
    alike = torch.ones(EXPERTS)

    def distance() -> Weighting:
        return Distance(clusters, ByteTokenizer().decode)

    ways: Mapping[str, Weighting] = {
        "ensemble, uniform": Uniform(EXPERTS),
        "ensemble, posterior": Posterior(alike),
        "ensemble, posterior, top 2": TopK(Posterior(alike), 2),
        "ensemble, posterior, top 1": TopK(Posterior(alike), 1),
        "ensemble, distance": distance(),
        "ensemble, distance, top 2": TopK(distance(), 2),
        "ensemble, distance, top 1": TopK(distance(), 1),
    }
    priors = priors_of_kinds(models, chosen)
    found = {name: list[float]() for name in (*ways, TOLD_THE_KIND)}
    for kind in sorted({window.kind for window in tested}):  # as they stand in `tested`
        own = Posterior(priors.get(kind, alike))
        for tokens, targets in batches([window for window in tested if window.kind == kind]):
            log_likelihoods = likelihoods(models, tokens, targets)
            for name, way in {**ways, TOLD_THE_KIND: own}.items():
                found[name] += losses(way, tokens, targets, log_likelihoods).tolist()
    return found


def priors_of_kinds(models: Sequence[Transformer], chosen: Sequence[Window]) -> dict[str, Tensor]:
    """Return a prior for text of each kind: the moving average of posteriors, as Branch-Train-Merge caches it."""
    found = dict[str, Tensor]()
    for kind in {window.kind for window in chosen}:
        posteriors = []
        for tokens, targets in batches([window for window in chosen if window.kind == kind]):
            way = Posterior(torch.ones(EXPERTS))
            losses(way, tokens, targets, likelihoods(models, tokens, targets))
            posteriors.append(way.log_weights().exp())
        found[kind] = cached_prior(torch.cat(posteriors))
    return found


# --- what is told ---


def paired(documents: Sequence[str], differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of differences, and its standard error over documents: those of one are alike."""
    means = by_document(documents, differences)
    return mean(means), stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan


def by_document(documents: Sequence[str], values: Sequence[float]) -> list[float]:
    """Return the mean of each document."""
    found = defaultdict[str, list[float]](list)
    for document, value in zip(documents, values, strict=True):
        found[document].append(value)
    return [mean(each) for each in found.values()]


class Share(NamedTuple):
    """How much of one gain another is, and the standard error; not a number where there is no gain to be shared."""

    mean: float
    error: float

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "-"
        return f"{self.mean:.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")

    def is_near(self, value: float) -> bool:
        return abs(self.mean - value) <= 2 * self.error


def share_of(documents: Sequence[str], gains: Sequence[float], whole_gains: Sequence[float]) -> Share:
    """Return which share of the whole gain a gain is, both being of the same windows.

    Args:
        documents: of each window.
    """
    mine, whole = by_document(documents, gains), by_document(documents, whole_gains)
    if mean(whole) <= 0:
        return Share(math.nan, math.nan)
    share = mean(mine) / mean(whole)
    # of a ratio of means: the error of mine - share whole, by the mean of the whole
    apart = [one - share * other for one, other in zip(mine, whole, strict=True)]
    return Share(share, stdev(apart) / math.sqrt(len(apart)) / mean(whole) if len(apart) > 1 else math.nan)


def gained(all_found: Sequence[Found], losses_of: Callable[[Found], Sequence[float]], kind: str | None = None) -> Share:
    """Return the share of the one model's gain over the seed model, of all seeds together.

    Args:
        losses_of: of a seed, of each window.
        kind: of the text; None: all.
    """
    documents, mine, whole = list[str](), list[float](), list[float]()
    for found in all_found:
        each = zip(found.documents, losses_of(found), found.losses[START], found.losses[REFERENCE], strict=True)
        for document, loss, start, reference in each:
            if kind in (None, document.partition(".")[0]):
                documents.append(document)
                mine.append(start - loss)
                whole.append(start - reference)
    return share_of(documents, mine, whole)


def losses_in(name: str) -> Callable[[Found], Sequence[float]]:
    return lambda found: found.losses[name]


def oracle(found: Found) -> list[float]:
    """Return the losses of whichever expert is best at each document: what is to be had by asking one of them."""
    experts = [name for name in found.losses if name.startswith("expert ")]
    windows = defaultdict[str, list[int]](list)
    for window, document in enumerate(found.documents):
        windows[document].append(window)
    best = {
        document: min(experts, key=lambda name: sum(found.losses[name][window] for window in mine))
        for document, mine in windows.items()
    }
    return [found.losses[best[document]][window] for window, document in enumerate(found.documents)]


def shares(all_found: Sequence[Found]) -> tuple[str, str]:
    """Return which shares of the one model's gain are reached, the best first, and whether the bar is."""
    kinds = sorted({document.partition(".")[0] for document in all_found[0].documents})
    names = [name for name in all_found[0].losses if name.startswith(COMPOSED)]
    rows = sorted(((name, losses_in(name)) for name in names), key=lambda row: -_mean(gained(all_found, row[1])))
    rows.append(("the best expert of each document, found by its loss", oracle))
    lines = [
        [name, gained(all_found, of), *(gained([found], of) for found in all_found)]
        + [gained(all_found, of, kind) for kind in kinds]
        for name, of in rows
    ]
    header = ["row", "share of the gain", *(f"seed {found.seed}" for found in all_found), *kinds]
    return table(header, lines), verdict(all_found, [name for name, _ in rows[:-1] if name != TOLD_THE_KIND])


def _mean(share: Share) -> float:
    return -math.inf if math.isnan(share.mean) else share.mean


def verdict(all_found: Sequence[Found], names: Sequence[str]) -> str:
    """Return in a few words which row is the best, and whether it comes as far as it should.

    Args:
        names: of rows, the best first.
    """
    best = gained(all_found, losses_in(names[0]))
    if math.isnan(best.mean):
        return "The one model is no better than the seed model: there is no gain to have a share of."
    each = ", ".join(f"{gained([found], losses_in(names[0])).mean:.3f}" for found in all_found)
    word = "reaches" if best.mean >= BAR else "**misses**"
    doubt = f" The bar lies within two errors of it, so {BAR:g} is not decided." if best.is_near(BAR) else ""
    return (
        f"The best of {len(names)} composed rows that are told nothing of kinds, found by these very documents: "
        f"{names[0]}, {best} of the one model's gain over the seed model (seeds: {each}). It {word} {BAR:g}.{doubt}"
    )


def sections_of(all_found: Sequence[Found], before: float | None) -> list[str]:
    first = all_found[0]
    kinds = sorted({document.partition(".")[0] for document in first.documents})
    missing = [kind for kind in ("python", *PLACES) if kind not in kinds]
    rows = []
    for name in first.losses:
        documents, differences, by_kind = list[str](), list[float](), defaultdict[str, list[float]](list)
        for found in all_found:
            documents += found.documents
            pairs = zip(found.documents, found.losses[name], found.losses[REFERENCE], strict=True)
            for document, loss, reference in pairs:
                differences.append(loss - reference)
                by_kind[document.partition(".")[0]].append(loss)
        gap, error = paired(documents, differences)
        total, each = first.costs[name]
        told = "" if name == REFERENCE else f"{gap:+.4f} ± {error:.4f}"
        seeds = " / ".join(f"{mean(found.losses[name]):.3f}" for found in all_found)
        rows.append(
            [name, f"{mean(mean(by_kind[kind]) for kind in kinds):.4f}", told]
            + [f"{mean(by_kind[kind]):.3f}" for kind in kinds]
            + [seeds, f"{total:,.0f}", f"{each:.2f}"]
        )
    seeds_named = ", ".join(str(found.seed) for found in all_found)
    header = ["row", "mean of kinds", "to the one model", *kinds, f"all windows, seed {seeds_named}"]
    parts = [
        [found.seed, number, *(f"{cluster.get(kind, 0) / 1e6:.2f}" for kind in kinds)]
        for found in all_found
        for number, cluster in enumerate(found.clusters)
    ]
    taken = "; ".join(f"seed {found.seed}: {', '.join(found.taken)}" for found in all_found)
    num_windows, num_documents = len(first.documents), len(set(first.documents))
    return [
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        f"{num_windows} windows of {SEQ_LEN} bytes of {num_documents} documents are tested."
        + (f" This machine has no text of these kinds: {', '.join(missing)}." if missing else ""),
        load_line(before),
        table([*header, "cost of training", "of a token"], rows),
        *shares(all_found),
        "MB of each kind in each expert's cluster:",
        table(["seed", "expert", *kinds], parts),
        f"The greedy soup took: {taken}.",
    ]


def known(path: Path) -> list[Found]:
    """Return the seeds that a file has; a last line that was cut short is none."""
    texts = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return [Found(**json.loads(text)) for text in texts]


def keep(path: Path, all_found: Sequence[Found]) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text("".join(json.dumps(asdict(each)) + "\n" for each in all_found), "utf-8")
    os.replace(beside, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--into", type=Path, required=True, help="where seeds are kept, one a line; models lie beside it"
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--scale", type=float, default=1.0, help="of all steps; the report is printed alone, unless 1")
    parser.add_argument("--report", action="store_true", help="train nothing, and write the report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = load()
    all_found = [each for each in known(options.into) if each.scale == options.scale]
    for seed in () if options.report else SEEDS[: options.seeds]:
        if seed not in {each.seed for each in all_found}:
            place = options.into.with_name(f"{options.into.name}.models-{options.scale:g}")
            all_found.append(run(seed, options.scale, place))
            keep(options.into, all_found)
            print(f"seed {seed} is done", flush=True)
    if not all_found:
        print("nothing is there yet: leave --report out")
        return 1
    title = "Experts without contact, against one model"
    text = whole(title, "python -m benchmarks.experts --into FILE", sections_of(all_found, before))
    if options.scale == 1:
        (FOLDER / "experts.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
