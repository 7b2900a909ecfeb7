"""Rules by which a few members cannot move what is merged far, against members that try: writes reports/merging.md.

    python -m benchmarks.merging               # half an hour of one idle core

Two of eight members bring something else than what they have trained, in each round of a small run (`_simulation`).
They know what the others bring, as the worst would.

    flip x 10   the negative of the others' mean, ten times as long         flip    as long
    noise       of the others' length                                       zero    nothing
    ALIE z      the others' mean less z of their standard deviations, element by element (1902.06156)
    inner       minus half of the others' mean (1903.03936)

Beside the loss that all rounds lead to, how far each round's result lies from the mean of the honest, relative to how
long that is.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from sysconfig import get_paths

import torch
from torch import Tensor

from benchmarks import report
from benchmarks._simulation import simulate
from weft.data.corpus import CorpusConfig, TextSource
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.store.home import Home
from weft.sync.merge.robust import RobustMean
from weft.sync.method.choices import MultiKrumConfig, Rule, TrimmedMeanConfig
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.method.schedule import CosineConfig

NUM_PEERS, NUM_ATTACKERS, NUM_ROUNDS = 8, 2, 30
EVERY, BATCH, SEQ_LEN = 10, 4, 64
TOKENS = NUM_PEERS * NUM_ROUNDS * EVERY * BATCH * SEQ_LEN
MOST_WORSE = 0.01  # the aim: loss under `flip x 10`, of the plain mean's without an attack
RULES: dict[str, Rule] = {
    "mean": "peers_mean",
    "clipped_mean": "clipped_mean",
    "centered_clip": "centered_clip",
    "trimmed_mean, 2": TrimmedMeanConfig(left_out=NUM_ATTACKERS),
    "median": "median",
    "multi_krum, 2": MultiKrumConfig(left_out=NUM_ATTACKERS),
}
Attack = Callable[[Tensor, torch.Generator], Tensor]  # of what the others bring, a row each


def _length(honest: Tensor) -> float:
    return float(honest.norm(dim=1).mean())


def _noise(honest: Tensor, luck: torch.Generator) -> Tensor:
    drawn = torch.randn(honest.shape[1], generator=luck)
    return drawn * (_length(honest) / float(drawn.norm()))


ATTACKS: dict[str, tuple[Attack | None, int]] = {  # and how many seeds
    "none": (None, 3),
    "flip x 10": (lambda honest, _: -10 * honest.mean(0), 3),
    "flip": (lambda honest, _: -honest.mean(0), 1),
    "noise": (_noise, 1),
    "zero": (lambda honest, _: torch.zeros(honest.shape[1]), 1),
    "ALIE 0.5": (lambda honest, _: honest.mean(0) - 0.5 * honest.std(0), 1),
    "ALIE 1.5": (lambda honest, _: honest.mean(0) - 1.5 * honest.std(0), 1),
    "inner": (lambda honest, _: -0.5 * honest.mean(0), 1),
}


def run_file(rule: Rule, seed: int) -> RunFile:
    source = TextSource(paths=(f"{get_paths()['stdlib']}/*.py",))
    return RunFile(
        name="merging",
        peers=NUM_PEERS,
        seed=seed,
        model=ShapedModel(num_layers=2, num_heads=2, width=64, ffn_width=128),
        data=CorpusConfig(source=source, heldout_fraction=0.1),
        method=DiLoCoConfig(every=EVERY, lr=0.7, momentum=0.5, merge=rule),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=TOKENS,
            evaluate_every=0,
            evaluate_windows=400,
            schedule=CosineConfig(lr=3e-3, warmup_tokens=TOKENS // 20, total_tokens=TOKENS),
        ),
    )


def forging(attack: Attack | None, rule: Rule, seed: int, apart: list[float]) -> Callable[[int, list[Tensor]], None]:
    """Return what changes a round's deltas, and tells `apart` how far from the honest mean the rule merges them."""
    luck = torch.Generator().manual_seed(seed)

    def forge(_number: int, deltas: list[Tensor]) -> None:
        honest = torch.stack(deltas if attack is None else deltas[NUM_ATTACKERS:])
        if attack is not None:
            for number in range(NUM_ATTACKERS):
                deltas[number] = attack(honest, luck)
        right = honest.mean(0)
        apart.append(float((merged(rule, deltas) - right).norm() / right.norm()))

    return forge


def merged(rule: Rule, deltas: list[Tensor]) -> Tensor:
    """Return what a rule makes of deltas of as many tokens each, as one part."""
    if rule == "peers_mean" or rule == "senders_mean":  # apart: types follow it so
        return torch.stack(deltas).mean(0)
    by_rule = RobustMean(rule, len(deltas[0]))
    for delta in deltas:
        by_rule.add(EVERY * BATCH * SEQ_LEN, delta)
    return by_rule.result()


def main() -> None:
    before, losses, far = report.load(), dict[tuple[str, str], list[float]](), dict[tuple[str, str], list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        for name, (attack, num_seeds) in ATTACKS.items():
            for rule, choice in RULES.items():
                for seed in range(num_seeds):
                    forge = forging(attack, choice, seed, far.setdefault((name, rule), []))
                    found = simulate(run_file(choice, seed), Path(folder), home, forge=forge)
                    losses.setdefault((name, rule), []).append(found.loss)
                loss, off = mean(losses[name, rule]), mean(far[name, rule])
                print(f"{name}, {rule}: {loss:.4f}, {off:.3f} apart", flush=True)
    clean = mean(losses["none", "mean"])
    rows = [[name, *(_cell(losses[name, rule], clean) for rule in RULES)] for name in ATTACKS]
    apart = [[name, *(f"{mean(far[name, rule]):.2f}" for rule in RULES)] for name in ATTACKS]
    worse = {rule: mean(losses["flip x 10", rule]) / clean - 1 for rule in list(RULES)[1:]}
    missed = [f"{rule} ({off:+.1%})" for rule, off in worse.items() if off > MOST_WORSE]
    sections = [
        f"A model of 2 layers, width 64, on bytes of Python's standard library; {NUM_PEERS} members, of whom "
        f"{NUM_ATTACKERS} attack; diloco, H = {EVERY}, {NUM_ROUNDS} rounds. Held-out loss in nats per token, and how "
        "far it is from that of the mean without an attack. Where several seeds were played: their mean, and the "
        f"standard deviation. {report.load_line(before)}",
        report.table(["attack", *RULES], rows),
        "How far what is merged lies from the mean of the honest members, by the length of that: mean over all rounds.",
        report.table(["attack", *RULES], apart),
        f"The aim: under flip x 10, within {MOST_WORSE:.0%} of the mean without an attack. "
        + (f"Missed by {', '.join(missed)}." if missed else "All rules reach it."),
    ]
    report.write("merging", "Merging beside members that mean harm", "python -m benchmarks.merging", sections)


def _cell(losses: list[float], clean: float) -> str:
    spread = f" +- {stdev(losses):.3f} ({len(losses)})" if len(losses) > 1 else ""
    return f"{mean(losses):.3f}{spread}, {mean(losses) / clean - 1:+.1%}"


if __name__ == "__main__":
    main()
