"""The square-cube law: how busy machines are by width and round trip, beside SWARM's figures, with blocks timed here.

    python -m benchmarks.square_cube            # half a minute; draws reports/square_cube.svg, too

One layer a stage, a line of 500 Mbit/s, micro-batches of 512 tokens. What a machine computes is reckoned at one rate
for all widths, as the law has it; what this one computes is timed, with the section's own forward pass and both parts
of its backward pass.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from benchmarks.report import FOLDER, load, load_line, table, write
from benchmarks.rig.square_cube import Setting, compute_s, utilisation
from weft.clock import SystemClock
from weft.codec.build import build
from weft.codec.config import Bf16Config, Int8Config
from weft.model.backward import Passed, forward
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, flatten
from weft.model.sections import sections
from weft.model.transformer import SectionModule
from weft.pipeline.sender import PER_STAGE
from weft.plan.pipeline import NUM_HOPS

RTTS_MS = (0, 10, 50, 100, 200)
WIDTHS = (256, 512, 768, 1024, 2048, 4096, 12_288)
TIMED = (256, 512, 1024, 2048)
NUM_TOKENS, BPS = 512, 500e6
NUM = 1 << 20  # of numbers, whose bytes each are told
BF16, INT8 = (build(config).nbytes(NUM) / NUM for config in (Bf16Config(), Int8Config()))
# A V100's 125 TFLOP/s in half precision, used to a fifth: near what the paper's rows of 4096 and 12,288 imply of 512
# tokens, 22 and 24.
FLOPS_PER_S = 25e12
ALONE = Setting(flops_per_s=FLOPS_PER_S, bps=BPS, value_nbytes=BF16, num_tokens=NUM_TOKENS, num_trips=1.0)
NUM_STAGES = 4
PASSING = replace(ALONE, num_trips=float(NUM_HOPS), num_under_way=PER_STAGE * NUM_STAGES)

# 2301.11913, a V100 at 500 Mbit/s, per cent. The ends of the first and of the third row agree with a reading note of
# the paper; all others are as remembered, and nobody has held them against it.
PUBLISHED: dict[str, tuple[int, tuple[float, ...]]] = {
    "base": (768, (18.0, 11.8, 4.88, 2.78, 1.53)),
    "xxlarge": (4096, (32.1, 28.9, 20.1, 14.9, 10.1)),
    "GPT-3": (12_288, (82.1, 79.3, 70.3, 60.2, 48.5)),
    "Ours, three layers": (4096, (89.5, 87.2, 79.5, 71.5, 59.2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-plot", action="store_true")
    options, before = parser.parse_args(), load()
    torch.set_num_threads(1)
    head = ("width", *(f"{rtt} ms" for rtt in RTTS_MS))
    sections_of_report = [
        f"Share of its time that a machine computes which holds one layer, in per cent. {load_line(before)}",
        "## One micro-batch at a time",
        f"bf16 both ways, {FLOPS_PER_S / 1e12:.0f} TFLOP/s at all widths, one round trip waited for in a micro-batch. "
        "Behind, what SWARM (2301.11913) published of a V100: of these only the ends of base and GPT-3 have been "
        "checked, and what was sent of a number is not known here. Half as many bytes, as int8 has, come nearer.",
        table(
            head,
            [
                *_rows(ALONE),
                *_named(),
                *((f"SWARM, {name} ({width:,})", *of) for name, (width, of) in PUBLISHED.items()),
            ],
        ),
        "What was published follows the law's form, 1 / u = 1 + (b + r) / c, whatever it was measured with: two "
        "figures of each row, found by least squares, give back all five.",
        table(("row", "b / c", "ms of c", "most that a column differs, points"), list(_fits())),
        "## As weft passes them",
        f"{PASSING.num_under_way} under way at a time, as in {NUM_STAGES} stages of one member; {NUM_HOPS} round trips "
        "a micro-batch: each way a call, a request and the first bytes.",
        table(head, _rows(PASSING)),
        f"The same in int8, {INT8:.3f} bytes a number:",
        table(head, _rows(replace(PASSING, value_nbytes=INT8))),
        "## This machine, one core",
        f"One layer's forward pass, the gradient of its input and of its weights, {NUM_TOKENS} tokens, fp32, median of "
        "three; and what follows at 500 Mbit/s in bf16, one at a time.",
        table(("width", "seconds", "GFLOP/s", *head[1:]), _timed()),
    ]
    if not options.no_plot:
        _draw()
        sections_of_report.append("![utilisation by width](square_cube.svg)")
    write("square_cube", "The square-cube law", "python -m benchmarks.square_cube", sections_of_report, ["matplotlib"])


def _rows(setting: Setting) -> list[tuple[object, ...]]:
    return [(f"{width:,}", *_shares(width, setting)) for width in WIDTHS]


def _named() -> list[tuple[object, ...]]:
    """Return the widths of which something was published, in int8."""
    setting, widths = replace(ALONE, value_nbytes=INT8), sorted({width for width, _ in PUBLISHED.values()})
    return [(f"{width:,}, int8", *_shares(width, setting)) for width in widths]


def _shares(width: int, setting: Setting) -> list[str]:
    return [f"{100 * utilisation(width, rtt / 1e3, setting):.3g}" for rtt in RTTS_MS]


def _fits() -> Sequence[tuple[object, ...]]:
    found = []
    for name, (_, shares) in PUBLISHED.items():
        # 1/u = a + s r, each column's error as a share of its own.
        inverse = torch.tensor([100 / share for share in shares], dtype=torch.float64)
        columns = torch.stack([torch.ones(len(RTTS_MS), dtype=torch.float64), torch.tensor(RTTS_MS).double()], 1)
        a, slope = torch.linalg.lstsq(
            columns / inverse[:, None], torch.ones(len(RTTS_MS), 1).double()
        ).solution.flatten()
        most = max(abs(100 / float(a + slope * rtt) - share) for rtt, share in zip(RTTS_MS, shares, strict=True))
        found.append((name, f"{float(a) - 1:.3g}", f"{1 / float(slope):.3g}", f"{most:.2f}"))
    return found


def _timed() -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for width in TIMED:
        took_s = _block_s(width)
        setting = replace(ALONE, flops_per_s=FLOPS_PER_S * compute_s(width, ALONE) / took_s)
        rows.append((f"{width:,}", f"{took_s:.3g}", f"{setting.flops_per_s / 1e9:.3g}", *_shares(width, setting)))
    return rows


def _passed(model: FlatModel, x: torch.Tensor) -> Passed:
    return forward(model, lambda module: module(x), x)


def _block_s(width: int) -> float:
    """Return what a micro-batch takes in the middle one of three layers of this width."""
    inside = round(8 / 3 * width / 64) * 64  # so that a layer has 12 C^2 elements
    config = ModelConfig(
        vocab_size=64,
        num_layers=3,
        num_heads=max(1, width // 64),
        num_kv_heads=max(1, width // 64),
        width=width,
        ffn_width=inside,
        max_seq_len=NUM_TOKENS,
    )
    model = flatten(SectionModule(config, sections(config, 3)[1]), "cpu")
    clock, times = SystemClock(), []
    for _ in range(4):
        x = torch.ones(1, NUM_TOKENS, width)
        began = clock.now()
        passed = _passed(model, x)
        passed.input_gradient(torch.ones_like(x))
        passed.add_weight_gradients()
        times.append(clock.now() - began)
    return median(times[1:])


def _draw() -> None:
    import matplotlib as library
    from matplotlib.figure import Figure

    widths = [2 ** (number / 4) for number in range(32, 56)]
    panels = (
        ("one micro-batch at a time, bf16, and SWARM's", ALONE),
        (f"{PASSING.num_under_way} under way, bf16", PASSING),
        (f"{PASSING.num_under_way} under way, int8", replace(PASSING, value_nbytes=INT8)),
    )
    with library.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "path"}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        for number, (title, setting) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), number + 1)
            for turn, rtt in enumerate(RTTS_MS):
                shares = [100 * utilisation(round(width), rtt / 1e3, setting) for width in widths]
                axes.plot(widths, shares, color=f"C{turn}", label=f"{rtt} ms")
                if not number:
                    for name, (width, published) in PUBLISHED.items():
                        marker = "x" if name.startswith("Ours") else "o"
                        axes.scatter(width, published[turn], s=18, color=f"C{turn}", marker=marker)
            axes.set_xscale("log", base=2)
            axes.set_xticks([256, 1024, 4096, 12_288], ["256", "1,024", "4,096", "12,288"])
            axes.set_ylim(0, 102)
            axes.set_title(title, fontsize="medium")
            axes.set_xlabel("width of the one layer that a machine holds")
            axes.grid(alpha=0.2)
        figure.axes[0].set_ylabel("of its time a machine computes, per cent")
        figure.axes[0].legend(title="round trip", fontsize="small")
        figure.savefig(FOLDER / "square_cube.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
