"""Stacks in an engine, against the stack that is computed whole."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.nn.functional import rms_norm

from unit.compose.stacks.small import CONFIG, VOCAB, WIDTH, space
from weft.compose.stacks import serving
from weft.compose.stacks.body import body, fresh
from weft.compose.stacks.serving import StackSteps, needs_of, steps_of
from weft.compose.stacks.stack import (
    AffineConfig,
    Handover,
    PostConfig,
    PreConfig,
    ScaledConfig,
    Seam,
    Stack,
    identity_map,
)
from weft.engine.batch import Piece
from weft.engine.draw import Drawing
from weft.engine.engine import Engine
from weft.engine.load import Plan
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.engine.step import KeysAndValues
from weft.engine.text import Wanted
from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.rng import integers64, stream

CPU = torch.device("cpu")
NUM_PAGES, CONTEXT = 24, 256
DEEP = structs.replace(CONFIG, num_layers=3, max_seq_len=CONTEXT)
GROUPED = structs.replace(DEEP, num_heads=4, num_kv_heads=2, ffn_width=40, window=70)
HANDOVERS = (PostConfig(), PreConfig(), ScaledConfig(alpha=3.0), AffineConfig())
by_handover = pytest.mark.parametrize("handover", HANDOVERS, ids=lambda each: type(each).__name__)


def stacked(handover: Handover, *configs: ModelConfig, cut: int = 0) -> Stack:
    """Return a stack of members that are not alike, whose maps, where it has any, are no identities."""
    num = len(configs)
    members = tuple(body(config, 6 * fresh(config, seed)) for seed, config in enumerate(configs))
    seams = (Seam(handover=handover, cut_last=cut, cut_first=cut),) * (num - 1)
    map_ = identity_map(WIDTH).cumsum(1) if isinstance(handover, AffineConfig) else None
    return Stack(space(), members, seams, (map_,) * (num - 1))


def planned(kind: Kind = "fp32") -> Plan:
    return Plan(kind, NUM_PAGES, 0, 0)


def text_of(num: int, seed: int) -> list[int]:
    return [int(each) % VOCAB for each in integers64(stream(seed, "text"), num)]


class Bench:
    """Steps of a stack, and pages that its texts have."""

    def __init__(self, steps: StackSteps) -> None:
        self.steps = steps
        self._free, self._pages = list(range(NUM_PAGES)), dict[int, list[int]]()

    def read(self, *given: tuple[int, list[int], int, int], sums: bool = False) -> Tensor:
        """Read tokens `start ..< stop` of texts in one step, and return the logits after the last of each."""
        pieces = []
        for name, text, start, stop in given:
            pages = self._pages.setdefault(name, [])
            pages += [self._free.pop() for _ in range(num_pages(stop) - len(pages))]
            pieces.append(Piece(text[start:stop], start, pages, num_draws=1, sums=sums))
        return self.steps.step(pieces)


@pytest.mark.parametrize("has_graphs", [False, True])
@by_handover
def test_texts_in_pieces_beside_each_other_have_the_logits_of_the_stack(
    handover: Handover, has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "KeysAndValues", partial(KeysAndValues, has_graphs=has_graphs))
    stack = stacked(handover, DEEP, GROUPED, DEEP, cut=1)
    bench, long, short = Bench(steps_of(stack, CPU, planned())), text_of(2 * PAGE + 9, 1), text_of(11, 2)
    bench.read((0, long, 0, PAGE + 3))
    bench.read((1, short, 0, 4), (0, long, PAGE + 3, len(long) - 6))
    for back in range(6, 0, -1):
        ends = {name: len(text) - back + 1 for name, text in enumerate((long, short))}
        begins = {0: ends[0] - 1, 1: 4 if back == 6 else ends[1] - 1}
        found = bench.read((0, long, begins[0], ends[0]), (1, short, begins[1], ends[1]))
        expected = [stack.logits(torch.tensor([text[: ends[n]]]))[0, -1] for n, text in enumerate((long, short))]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


@by_handover
async def test_the_likeliest_tokens_of_an_engine_are_those_of_the_stack(handover: Handover) -> None:
    stack = stacked(handover, DEEP, GROUPED)
    engine = Engine(steps_of(stack, CPU, planned()), vocab_size=VOCAB, context=CONTEXT, num_pages=NUM_PAGES)
    seen = set[int]()
    try:
        prompts = [text_of(num, num) for num in (5, 30, PAGE + 1)]
        texts = [engine.begin(Wanted("key", tuple(each), 20, Drawing(temperature=0.0))) for each in prompts]
        for prompt, text in zip(prompts, texts, strict=True):
            drawn = [each.token async for each in text]
            tokens = list(prompt)
            for _ in range(20):
                tokens.append(int(stack.logits(torch.tensor([tokens]))[0, -1].argmax()))
            assert drawn == tokens[len(prompt) :]
            seen |= set(drawn)
        assert len(seen) > 3  # or a stack of anything would do
    finally:
        engine.close()


def test_what_is_planned_is_what_is_held() -> None:
    stack = stacked(AffineConfig(), DEEP, GROUPED, cut=1)
    needs, steps = needs_of(stack, "fp32", CONTEXT), steps_of(stack, CPU, planned())
    steppers = [*steps._below, steps._last]
    held = sum(each._weights.nbytes for each in steppers) + 4 * WIDTH * WIDTH  # and the map
    assert held == pytest.approx(needs.weights_nbytes, rel=0.05)
    kept = [layer for each in steppers for layer in each._kept.layers]
    assert len(kept) == 4  # of six, two are cut off
    tensors = [each for layer in kept for each in vars(layer).values() if isinstance(each, Tensor)]
    assert sum(each.nbytes for each in tensors) == NUM_PAGES * needs.page_nbytes
    assert needs.text_nbytes == num_pages(CONTEXT) * needs.page_nbytes


@pytest.mark.parametrize("handover", HANDOVERS[2:], ids=["scaled", "affine"])
def test_with_exact_numbers_a_text_has_the_same_bits_whatever_is_beside_it(handover: Handover) -> None:
    stack, text, other = stacked(handover, DEEP, GROUPED), text_of(40, 3), text_of(90, 4)
    alone, beside = (Bench(steps_of(stack, CPU, planned("exact"))) for _ in range(2))
    assert alone.read((0, text, 0, 40)).equal(beside.read((1, other, 0, 90), (0, text, 0, 40))[1:])


def test_means_of_hidden_states_are_those_after_the_last_norm() -> None:
    stack, text = stacked(PostConfig(), DEEP, GROUPED), text_of(12, 5)
    bench = Bench(steps_of(stack, CPU, planned()))
    bench.read((0, text, 0, 12), sums=True)
    last = stack.exits(torch.tensor([text]))[-1]
    expected = rms_norm(last, last.shape[-1:], stack.space.norm, stack.space.norm_eps)[0].sum(0)
    torch.testing.assert_close(bench.steps.sums[0], expected, rtol=1e-4, atol=1e-4)


def test_a_member_that_loops_is_refused() -> None:
    with pytest.raises(ConfigError, match="a member that loops is not served"):
        steps_of(replace(stacked(PostConfig(), DEEP, DEEP), loops=(1, 2)), CPU, planned())
