"""Sections with codecs between them: what is passed is what was promised, and what is no message is refused."""

import pytest
import torch
from torch import Tensor

from unit.pipeline.stages import BATCH_SIZE, CONFIG, SEQ_LEN, packed
from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int4Config, Int8Config
from weft.data.rows import batch_of
from weft.data.store import BEGINS, TRAINED
from weft.errors import PayloadError
from weft.ids import PeerId
from weft.model.flat import FlatModel, attach, cut, flatten
from weft.model.initial import initial_vector
from weft.model.sections import sections
from weft.model.transformer import SectionModule, Transformer
from weft.pipeline.codec.activations import ActivationConfig, AqSgdConfig, LplrConfig, SubspaceConfig
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.codec.subspace import WRITERS, confined, drawn
from weft.pipeline.device import Given, Passed
from weft.pipeline.link import parcel
from weft.pipeline.torch_device import TorchDevice
from weft.pipeline.worker import Sum
from weft.training.tied import averaged
from weft.wire import Buffer

# How far the gradient of all weights may be from that without codecs, as a share of it.
CASES: list[tuple[ActivationConfig, float]] = [
    (Fp32Config(), 1e-6),
    (Bf16Config(), 0.02),
    (Fp8Config(block=32), 0.2),
    (Int8Config(block=32), 0.05),
    (Int4Config(block=32), 0.6),
    (LplrConfig(rank=8), 0.05),
    (SubspaceConfig(rank=4, values="fp32"), 1e-4),
    (AqSgdConfig(values="int8"), 0.05),
]
NEXT, OTHER = PeerId("b" * 64), PeerId("c" * 64)


def sent_to(member: PeerId, passed: Passed) -> Buffer | None:
    """Return the output as a member of the next stage gets it; None: the section is the last one."""
    output = passed.output
    return output(member) if callable(output) else output


class Chain:
    def __init__(self, config: ActivationConfig, *, has_rows: bool = False) -> None:
        self.has_rows = has_rows
        vector = initial_vector(CONFIG, seed=5)
        vector[vector != 1] *= 10  # so that layers do something
        self.models: list[FlatModel] = []
        for section in sections(CONFIG, 3):
            model = flatten(SectionModule(CONFIG, section), "cpu")
            model.vector.copy_(cut(CONFIG, vector, section))
            if isinstance(config, SubspaceConfig):
                confined(config, CONFIG, section).begin(model.vector)
            self.models.append(model)
        self.devices = [self.made(config, number) for number in range(3)]

    def made(self, config: ActivationConfig, number: int) -> TorchDevice:
        return TorchDevice(self.models[number], Boundaries(config), SEQ_LEN, BATCH_SIZE, has_rows=self.has_rows)

    def step(self, ids: Tensor) -> float:
        given, passed = Given(len(ids), packed(ids), None), list[Passed]()
        output: Buffer | None = None
        for device in self.devices:
            assert device.tokens_nbytes == 4 * (SEQ_LEN + 1)
            assert device.input_nbytes(len(ids)) == len(output or b"")
            passed.append(device.forward(given))
            if (output := sent_to(NEXT, passed[-1])) is not None:
                given = Given(len(ids), given.tokens, parcel(output))
        gradient = None
        for device, each in zip(reversed(self.devices), reversed(passed), strict=True):
            assert device.gradient_nbytes(len(ids)) == len(gradient or b"")
            gradient = each.backward(gradient, NEXT)
        for each in passed:
            each.count()
        assert passed[-1].loss is not None
        return passed[-1].loss


def drawn_ids(num: int = BATCH_SIZE) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (num, SEQ_LEN + 1), generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize(("config", "bound"), CASES, ids=[repr(config) for config, _ in CASES])
@pytest.mark.parametrize("num", [1, BATCH_SIZE])
def test_gradients_through_codecs_are_near_to_those_of_the_whole(
    config: ActivationConfig, bound: float, num: int
) -> None:
    chain, ids = Chain(config), drawn_ids(num)
    loss = chain.step(ids)
    found = torch.cat([seen(config, model, model.gradient) for model in chain.models])
    expected, whole = plain(chain.models, ids)
    expected = torch.cat([seen(config, *each) for each in zip(chain.models, expected, strict=True)])
    expected *= num / BATCH_SIZE
    assert float((found - expected).norm() / expected.norm()) < bound
    assert loss == pytest.approx(whole, rel=bound)


def drawn_rows(num: int = BATCH_SIZE) -> Tensor:
    """Return words of rows: texts of a few tokens, and as many of them trained on as chance has it, some in each."""
    words = drawn_ids(num)
    drawn = torch.Generator().manual_seed(9)
    words |= torch.where(torch.rand(words.shape, generator=drawn) < 0.4, TRAINED, 0)
    words |= torch.where(torch.rand(words.shape, generator=drawn) < 0.3, BEGINS, 0)
    words[:, 1:3] = words[:, 1:3] & (BEGINS - 1) | TRAINED
    return words


@pytest.mark.parametrize("config", [Fp32Config(), SubspaceConfig(rank=4, values="fp32")], ids=["fp32", "subspace"])
def test_rows_go_through_stages_as_through_the_whole_model(config: ActivationConfig) -> None:
    chain = Chain(config, has_rows=True)
    parts = drawn_rows().split(1)
    batch = batch_of(torch.cat(parts), has_rows=True)
    for model in chain.models:
        model.zero_gradient()
    x = batch.tokens
    for model in chain.models[:-1]:
        x = model.module(x, positions=batch.positions)
    whole = chain.models[-1].module.loss(x, batch.targets, batch.positions)
    whole.backward()
    expected = torch.cat([seen(config, model, model.gradient.clone()) for model in chain.models])
    for model in chain.models:
        model.zero_gradient()
    total = Sum()
    for part in parts:
        total = total.plus(Given(len(part), packed(part), None), chain.step(part))
    means = [averaged(model.gradient, total, BATCH_SIZE) for model in chain.models]
    found = torch.cat([seen(config, model, model.gradient) for model in chain.models])
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    assert means[-1].loss == pytest.approx(whole.item(), rel=1e-3)


def test_words_of_running_text_have_no_marks() -> None:
    chain, words = Chain(Fp32Config()), drawn_rows()
    with pytest.raises(PayloadError, match=f"no {BATCH_SIZE} samples of"):
        chain.step(words)
    with pytest.raises(PayloadError, match=f"no {BATCH_SIZE} samples of"):
        Chain(Fp32Config(), has_rows=True).step(words + CONFIG.vocab_size)


def plain(models: list[FlatModel], ids: Tensor) -> tuple[list[Tensor], float]:
    """Return the gradients of each section, and the loss, as torch has them without codecs."""
    for model in models:
        model.zero_gradient()
    x = ids[:, :-1]
    for model in models[:-1]:
        x = model.module(x)
    whole = models[-1].module.loss(x, ids[:, 1:])
    whole.backward()
    return [model.gradient for model in models], whole.item()


def seen(config: ActivationConfig, model: FlatModel, gradient: Tensor) -> Tensor:
    """Return of a gradient what changes the weights: in a subspace, what of it lies there."""
    gradient = gradient.clone()
    if isinstance(config, SubspaceConfig):
        directions = drawn(config, CONFIG.width, CONFIG.vocab_size).directions
        for span in model.layout:
            view = model.layout.view(gradient, span)
            if span.name == "embed.weight":
                view.copy_(view @ directions @ directions.T)
            elif span.name.endswith(WRITERS):
                view.copy_(directions @ (directions.T @ view))
    return gradient


def test_the_sections_of_a_chain_are_the_whole() -> None:
    ids = drawn_ids()
    whole = flatten(Transformer(CONFIG), "cpu")
    vector = initial_vector(CONFIG, seed=5)
    vector[vector != 1] *= 10
    attach(whole.module, vector)
    expected = whole.module.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    assert Chain(Fp32Config()).step(ids) == pytest.approx(expected.item(), rel=1e-6)


def test_samples_that_come_again_are_known_by_their_tokens() -> None:
    """With aqsgd the loss comes nearer to that without codecs, wherever in a micro-batch a sample lies."""
    chain, ids = Chain(AqSgdConfig()), drawn_ids()
    exact = Chain(Fp32Config()).step(ids)
    first = abs(chain.step(ids) - exact)
    chain.step(ids.flip(0))
    again = abs(chain.step(ids) - exact)
    assert again < first / 3


def test_an_output_is_encoded_for_what_each_member_holds() -> None:
    config = AqSgdConfig()
    chain, ids = Chain(config), drawn_ids()
    chain.step(ids)
    anew = chain.made(config, 1)  # another member of the next stage, or one that has started anew
    tokens = packed(ids)
    passed = chain.devices[0].forward(Given(len(ids), tokens, None))
    known, unknown, once_more = (sent_to(peer, passed) for peer in (NEXT, OTHER, NEXT))
    assert known is not None
    assert unknown is not None
    assert once_more is not None
    with pytest.raises(PayloadError, match="not held here"):
        anew.forward(Given(len(ids), tokens, parcel(known)))
    anew.forward(Given(len(ids), tokens, parcel(unknown)))
    anew.forward(Given(len(ids), tokens, parcel(once_more)))  # alone, as long as no gradient of the last has come
    chain.devices[1].forward(Given(len(ids), tokens, parcel(known)))


def test_a_sample_is_held_by_sender() -> None:
    config = AqSgdConfig()
    chain, ids = Chain(config), drawn_ids()
    tokens = packed(ids)
    for _ in range(2):  # the second builds on what the first left with it
        passed = chain.devices[0].forward(Given(len(ids), tokens, None))
        output = sent_to(NEXT, passed)
        assert output is not None
        there = chain.devices[1].forward(Given(len(ids), tokens, parcel(output), sender=OTHER))
        gradient = there.backward(chain.devices[2].forward(_after(there, tokens, len(ids))).backward(None), NEXT)
        passed.backward(gradient, NEXT)
    with pytest.raises(PayloadError, match="not held here"):
        chain.devices[1].forward(Given(len(ids), tokens, parcel(output), sender=NEXT))


def _after(passed: Passed, tokens: bytes, num: int) -> Given:
    output = sent_to(NEXT, passed)
    assert output is not None
    return Given(num, tokens, parcel(output))


@pytest.mark.parametrize(("config", "bound"), CASES, ids=[repr(config) for config, _ in CASES])
def test_what_is_no_message_is_refused(config: ActivationConfig, bound: float) -> None:
    chain, ids = Chain(config), drawn_ids()
    tokens = packed(ids)
    passed = chain.devices[0].forward(Given(len(ids), tokens, None))
    output = sent_to(NEXT, passed)
    assert output is not None
    for bad in (bytes(output)[:-1], b"\xff" * len(output)):
        with pytest.raises(PayloadError):
            chain.devices[1].forward(Given(len(ids), tokens, parcel(bad)))
    with pytest.raises(PayloadError):
        passed.backward(b"\xff" * chain.devices[0].gradient_nbytes(len(ids)))


@pytest.mark.parametrize("bad", [-1, CONFIG.vocab_size])
def test_tokens_beyond_the_vocabulary_are_refused(bad: int) -> None:
    ids = drawn_ids()
    ids[0, 3] = bad
    with pytest.raises(PayloadError, match="tokens of this run"):
        Chain(Bf16Config()).devices[0].forward(Given(len(ids), packed(ids), None))
