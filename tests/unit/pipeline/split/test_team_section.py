"""A section that a team computes is the undivided one; and what becomes of it when a member is gone."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from unit.pipeline.split.crew import Crew
from unit.pipeline.split.layer import FAMILIES, SMALL
from weft.codec.config import Fp32Config
from weft.errors import ConfigError, PeerError
from weft.ids import PeerId
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, cut, flatten
from weft.model.initial import initial_vector
from weft.model.sections import sections
from weft.model.transformer import SectionModule
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import Given, Step
from weft.pipeline.link import Parcel, parcel
from weft.pipeline.split.cut import SplitConfig
from weft.pipeline.split.leader import Leader, LedPassed
from weft.pipeline.split.member import Means, TeamMember
from weft.pipeline.split.section import LayersAt, check_split
from weft.pipeline.torch_device import TorchDevice
from weft.pipeline.worker import CurrentStep

TOKENS, SAMPLES, BATCH = 12, 2, 4
STEP = Step(3, 0)


def config_of(family: str) -> ModelConfig:
    fields = SMALL | {"num_layers": 4, "max_seq_len": 64, "is_tied": False} | FAMILIES[family]
    return msgspec.convert(fields, ModelConfig)


def section_of(config: ModelConfig, number: int, num: int) -> FlatModel:
    part = sections(config, num)[number]
    model = flatten(SectionModule(config, part), "cpu")
    model.vector.copy_(cut(config, initial_vector(config, seed=2), part))
    return model


def given_to(config: ModelConfig, number: int) -> tuple[Given, Tensor]:
    """Return a micro-batch before a section, and a gradient of its output."""
    luck = torch.Generator().manual_seed(7)
    ids = torch.randint(0, config.vocab_size, (SAMPLES, TOKENS + 1), generator=luck, dtype=torch.int32)
    x, dy = torch.randn(2, SAMPLES, TOKENS, config.width, generator=luck)
    activations: Parcel | None = None if number == 0 else parcel(x.numpy().tobytes())
    return Given(SAMPLES, ids.numpy().tobytes(), activations, STEP), dy


class Teamed:
    """A crew whose first member leads, and the others help."""

    def __init__(self, config: ModelConfig, split: SplitConfig, number: int, num: int) -> None:
        self.crew = Crew(split.members)
        self.models = [section_of(config, number, num) for _ in range(split.members)]
        self.helpings: list[TeamMember] = []
        self.means = [self._means(config, split, each) for each in range(split.members)]
        self.make_lead = lambda: Leader(self.means[0], self.crew.clock)

    def _means(self, config: ModelConfig, split: SplitConfig, number: int) -> Means:
        exchanges, model = self.crew.exchanges[number], self.models[number]
        means = Means(
            stage=0,
            link=exchanges.link,
            exchanges=exchanges,
            team=lambda: tuple(PeerId(peer) for peer in self.crew.peers),
            section=SimpleNamespace(here=TorchDevice(model, Boundaries(Fp32Config()), TOKENS, BATCH)),
            layers=LayersAt(split, config.width),
            run=self.crew.compute.train,
            seq_len=TOKENS,
            micro_batch=SAMPLES,
            batch_size=BATCH,
        )
        if number:
            self.helpings.append(TeamMember(means, CurrentStep(0, self.crew.clock)))
        return means


def undivided(
    config: ModelConfig, number: int, num: int, times: int
) -> tuple[list[Tensor | None], float | None, Tensor]:
    """Return output and input gradient, the loss and the section's gradient, computed by one."""
    model = section_of(config, number, num)
    device = TorchDevice(model, Boundaries(Fp32Config()), TOKENS, BATCH)
    given, dy = given_to(config, number)
    for _ in range(times):
        passed = device.forward(given)
        back = passed.backward(None if number == num - 1 else dy.numpy().tobytes())
        passed.count()
    return [numbers(passed.output), numbers(back)], passed.loss, model.gradient


async def there_and_back(lead: Leader, given: Given, dy: Tensor) -> LedPassed:
    passed = await lead.forward(given)
    assert passed is not None
    await passed.backward(dy.numpy().tobytes(), None)
    return passed


def numbers(data: object) -> Tensor | None:
    return None if data is None else torch.from_numpy(np.frombuffer(data, "<f4").copy())  # type: ignore[call-overload]


def near(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return float((found - expected).norm() / expected.norm()) < 1e-5


SPLITS = [SplitConfig(by="heads"), SplitConfig(by="heads", members=3), SplitConfig(by="segments", members=3)]


@pytest.mark.parametrize(
    "split",
    [pytest.param(SPLITS[0], marks=pytest.mark.slow), *SPLITS[1:]],
    ids=["two by heads", "three by heads", "three by segments"],
)
@pytest.mark.parametrize(
    ("family", "number", "num"), [*((each, 1, 3) for each in FAMILIES), ("gqa", 0, 3), ("gqa", 2, 3), ("gqa", 0, 1)]
)
def test_a_team_computes_what_one_does(split: SplitConfig, family: str, number: int, num: int) -> None:
    config, found = config_of(family), list[object]()
    teamed = Teamed(config, split, number, num)
    given, dy = given_to(config, number)

    async def play() -> None:
        lead = teamed.make_lead()
        for _ in range(2):
            passed = await lead.forward(given)
            assert passed is not None
            back = await passed.backward(None if number == num - 1 else dy.numpy().tobytes(), None)
            await lead.means.run(passed.count)
        found.extend((numbers(passed.output), numbers(back), passed.loss))
        assert await lead.collect(teamed.models[0].gradient)

    teamed.crew.run(play)
    outputs, loss, gradient = undivided(config, number, num, times=2)
    assert near(found[0], outputs[0])  # type: ignore[arg-type]
    assert near(found[1], outputs[1])  # type: ignore[arg-type]
    assert found[2] == (None if loss is None else pytest.approx(loss, rel=1e-5))
    assert near(teamed.models[0].gradient, gradient)


def test_where_a_helper_is_gone_the_member_computes_alone_for_a_while() -> None:
    config = config_of("gqa")
    teamed = Teamed(config, SplitConfig(), 1, 3)
    given, _ = given_to(config, 1)

    async def play() -> None:
        lead = teamed.make_lead()
        assert await lead.forward(given) is not None
        await teamed.crew.nodes[1].aclose()
        assert await lead.forward(given) is None
        assert await lead.forward(given) is None

    teamed.crew.run(play)


def test_a_micro_batch_whose_helper_forgot_it_is_given_up_on_the_way_back() -> None:
    config = config_of("gqa")
    teamed = Teamed(config, SplitConfig(), 1, 3)
    given, dy = given_to(config, 1)

    async def play() -> None:
        passed = await teamed.make_lead().forward(given)
        assert passed is not None
        teamed.helpings[0].advance(Step(4, 0))
        with pytest.raises(PeerError):
            await passed.backward(dy.numpy().tobytes(), None)

    teamed.crew.run(play)


@pytest.mark.parametrize("split", SPLITS[1:], ids=["by heads", "by segments"])
@pytest.mark.parametrize("who", [0, 1], ids=["the leader's", "a helper's"])
def test_a_micro_batch_whose_weights_are_written_meanwhile_is_given_up_and_the_next_has_those(
    split: SplitConfig, who: int
) -> None:
    config = config_of("gqa")
    teamed = Teamed(config, split, 1, 3)
    given, dy = given_to(config, 1)

    async def play() -> None:
        lead = teamed.make_lead()
        passed = await lead.forward(given)
        assert passed is not None
        teamed.models[who].vector.mul_(1.0)
        with pytest.raises(PeerError):
            await passed.backward(dy.numpy().tobytes(), None)
        await asyncio.sleep(60)
        for model in teamed.models:
            model.vector.mul_(2.0)
        found = await lead.forward(given)
        assert found is not None
        await found.backward(dy.numpy().tobytes(), None)
        alone = await lead.means.run(lambda: teamed.means[0].section.here.forward(given))
        assert near(numbers(found.output), numbers(alone.output))

    teamed.crew.run(play)


def test_a_sum_that_is_not_of_exactly_what_counts_is_none() -> None:
    config = config_of("gqa")
    teamed = Teamed(config, SplitConfig(), 1, 3)
    given, dy = given_to(config, 1)

    async def play() -> None:
        lead = teamed.make_lead()
        for is_lost in (True, False):
            passed = await there_and_back(lead, given, dy)
            await lead.means.run(passed.count)
            if is_lost:
                teamed.helpings[0].advance(Step(4, 0))
        assert not await lead.collect(teamed.models[0].gradient)

    teamed.crew.run(play)


def test_what_counts_nowhere_is_in_no_sum() -> None:
    config = config_of("gqa")
    teamed = Teamed(config, SplitConfig(), 1, 3)
    given, dy = given_to(config, 1)

    async def play() -> None:
        lead = teamed.make_lead()
        for counts in (True, False, True):
            passed = await there_and_back(lead, given, dy)
            if counts:
                await lead.means.run(passed.count)
        assert await lead.collect(teamed.models[0].gradient)

    teamed.crew.run(play)
    assert near(teamed.models[0].gradient, undivided(config, 1, 3, times=2)[2])


@pytest.mark.parametrize(
    ("split", "words"),
    [(SplitConfig(members=5), "key and value heads"), (SplitConfig(by="segments", members=7), "of 12 tokens")],
)
def test_what_cannot_be_shared_is_refused(split: SplitConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_split(split, config_of("gqa"), TOKENS)


def test_segments_of_a_windowed_model_are_refused_where_the_window_is_shorter_than_the_samples() -> None:
    windowed = msgspec.structs.replace(config_of("gqa"), window=TOKENS - 1)
    with pytest.raises(ConfigError, match=f"see {TOKENS - 1} tokens, and samples have {TOKENS}. Split by heads"):
        check_split(SplitConfig(by="segments"), windowed, TOKENS)
    check_split(SplitConfig(by="segments"), windowed, TOKENS - 1)
    check_split(SplitConfig(by="heads"), windowed, TOKENS)
