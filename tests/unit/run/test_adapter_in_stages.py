"""An adapter whose model is cut: each stage has its part of both, and all parts together are the whole."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from unit.launch.test_terms import TICKET
from unit.pipeline.stages import packed
from weft.codec.config import Fp32Config
from weft.config import from_tree
from weft.cost.pipeline import BASE_NBYTES
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError
from weft.launch.fetch import fetch_run, lacks_first_weights, missing_base_nbytes, take_model
from weft.launch.terms import Heard, terms
from weft.model.config import AdapterConfig, ModelConfig, num_parameters, plain
from weft.model.flat import cut, over, paste
from weft.model.initial import initial_vector
from weft.model.peft import merged, write_adapter
from weft.model.sections import num_section_parameters
from weft.model.transformer import SectionModule, Transformer
from weft.model.weights import write_folder
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import Given
from weft.pipeline.link import parcel
from weft.pipeline.torch_device import TorchDevice
from weft.run.config import RunFile
from weft.run.frozen import base_of
from weft.run.genesis import drawn_adapter, initial, read_run, seal
from weft.run.machine import PeerConfig
from weft.run.outline import named_by, read_outline
from weft.run.staged import StagedConfig
from weft.store.home import Home
from weft.training.device import choose
from weft.training.section_memory import ASSUMED_MEMBERS, least_nbytes, needed_nbytes, of_run, section_memory
from weft.wire import encode

SEQ_LEN = 32
MODEL = ModelConfig(
    vocab_size=257, num_layers=4, num_heads=2, num_kv_heads=1, width=32, ffn_width=48, max_seq_len=SEQ_LEN, is_tied=True
)
STAGES = 3
ADAPTER = {"type": "lora", "rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}


def weights() -> Tensor:
    return initial_vector(MODEL, 3)


def run_file(**changes: Any) -> RunFile:
    tree = {
        "name": "cut",
        "stages": STAGES,
        "model": {"type": "folder", "path": "model"},
        "tokenizer": {"type": "json", "path": "model"},
        "adapter": ADAPTER,
        "data": {"source": {"type": "text", "paths": ["text.txt"]}},
        "train": {"seq_len": SEQ_LEN, "tokens": 10_000, "schedule": {"type": "constant"}},
        "method": {"type": "diloco"},
    }
    found: RunFile = from_tree(tree | changes, RunFile, where="run.toml")
    return found


def sealed(base: Path, vector: Tensor, **changes: Any) -> StagedConfig:
    write_folder(base / "model", MODEL, vector, ByteTokenizer().to_json())
    (base / "text.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    run = seal(run_file(**changes), base, Home(base / "home"), lambda _event: None).config
    assert isinstance(run, StagedConfig)
    return run


@pytest.mark.parametrize("is_half", [True, False], ids=["bf16", "fp32"])
def test_all_parts_are_the_whole(tmp_path: Path, is_half: bool) -> None:
    vector = weights().bfloat16().float() if is_half else weights()
    run, home = sealed(tmp_path, vector), Home(tmp_path / "home")
    assert read_run(encode(run), 1 << 30) == run
    assert run.tied is None, "nobody trains the matrix that both ends read"
    assert run.num_pieces == STAGES
    whole = base_of(run, home)
    assert whole is not None
    assert torch.equal(whole, vector)
    begins, trained = torch.zeros(run.num_parameters), 0
    for stage in range(STAGES):
        of = run.of_stage(stage)
        part, first = base_of(of, home), initial(of, home)
        assert part is not None
        assert first is not None
        assert torch.equal(part, cut(MODEL, vector, run.cuts[stage]))
        blob = home.blobs.open(of.base)  # type: ignore[arg-type]
        assert blob is not None
        assert len(blob) == of.held_base_nbytes == (2 if is_half else 4) * len(part)
        paste(run.model, begins, run.cuts[stage], first)
        trained += len(first)
    assert trained == run.num_parameters == num_parameters(run.model)
    drawn = initial_vector(run.model, run.seed)
    assert torch.equal(begins, drawn)
    elsewhere = [initial(run.of_stage(stage), Home(tmp_path / "elsewhere")) for stage in range(STAGES)]
    whole = drawn_adapter(run)
    assert whole is not None
    assert torch.equal(whole, drawn)
    assert not lacks_first_weights(run.of_stage(0), Home(tmp_path / "elsewhere"))
    for section, part in zip(run.cuts, elsewhere, strict=True):
        assert part is not None, "it follows from the seed"
        assert torch.equal(part, cut(run.model, drawn, section))


def test_sections_are_as_those_of_the_base(tmp_path: Path) -> None:
    run = sealed(tmp_path, weights())
    assert [len(each.layers) for each in run.cuts] == [1, 2, 1], "the ends hold the matrix of all tokens, too"
    largest = run.of_largest().stage
    assert largest in (0, 2), "though the middle one has most of the adapter"


def test_members_may_be_asked_for_all_parts_of_the_base(tmp_path: Path) -> None:
    run, elsewhere = sealed(tmp_path, weights()), Home(tmp_path / "elsewhere")
    assert isinstance(run.bases, tuple)
    assert set(run.bases) <= named_by(read_outline(encode(run), run.run), run.run)[0]
    sizes = [run.of_stage(stage).held_base_nbytes for stage in range(STAGES)]
    assert missing_base_nbytes(run, elsewhere) == sum(sizes)
    assert missing_base_nbytes(run.of_stage(1), elsewhere) == sizes[1]
    assert not missing_base_nbytes(run, Home(tmp_path / "home"))


def test_terms_and_plans_count_the_base(tmp_path: Path) -> None:
    run, settings = sealed(tmp_path, weights()), PeerConfig(device="cpu")
    told = [terms(run, TICKET, Home(tmp_path / name), settings, Heard()).fetch_nbytes for name in ("elsewhere", "home")]
    assert told[0] - told[1] >= min(run.of_stage(stage).held_base_nbytes for stage in range(STAGES))
    holding, base = of_run(run), [4 * num_section_parameters(plain(run.model), cut) for cut in run.cuts]
    assert least_nbytes(holding, run.cuts) > max(base) + BASE_NBYTES
    adapters = [section_memory(holding, cut, num_members=1, num_taken=1).on_cpu for cut in run.cuts]
    assert least_nbytes(holding, run.cuts) == BASE_NBYTES + max(
        each + more for each, more in zip(adapters, base, strict=True)
    )


def test_an_adapter_that_was_trained_before_goes_on(tmp_path: Path) -> None:
    adapted = msgspec.structs.replace(MODEL, adapter=AdapterConfig(rank=2))
    learnt = torch.randn(num_parameters(adapted), generator=torch.Generator().manual_seed(4))
    write_adapter(tmp_path / "mine", adapted, learnt)
    run = sealed(tmp_path, weights(), adapter={"type": "folder", "path": "mine"})
    begins = torch.zeros(run.num_parameters)
    for stage in range(STAGES):
        first = initial(run.of_stage(stage), Home(tmp_path / "home"))
        assert first is not None
        paste(run.model, begins, run.cuts[stage], first)
    assert torch.equal(begins, learnt)
    assert drawn_adapter(run) is None
    assert lacks_first_weights(run.of_stage(0), Home(tmp_path / "elsewhere"))
    assert initial(run.of_stage(0), Home(tmp_path / "elsewhere")) is None, "it has to be fetched"


def test_its_gradient_through_stages_is_that_of_the_whole(tmp_path: Path) -> None:
    run, home = sealed(tmp_path, weights()), Home(tmp_path / "home")
    luck = torch.Generator().manual_seed(6)
    vector = 0.1 * torch.randn(run.num_parameters, generator=luck)
    ids = torch.randint(0, 257, (2, SEQ_LEN + 1), generator=luck)
    whole = over(Transformer(run.model), vector.clone(), weights())
    loss = whole.module.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()

    models = []
    for stage in range(STAGES):
        with torch.device("meta"):
            module = SectionModule(run.model, run.cuts[stage])
        models.append(over(module, cut(run.model, vector, run.cuts[stage]), base_of(run.of_stage(stage), home)))
    devices = [TorchDevice(model, Boundaries(Fp32Config()), SEQ_LEN, len(ids)) for model in models]
    given, passed = Given(len(ids), packed(ids), None), []
    for device in devices:
        passed.append(device.forward(given))
        if passed[-1].output is not None:
            given = Given(len(ids), given.tokens, parcel(passed[-1].output))  # type: ignore[arg-type]
    gradient = None
    for each in reversed(passed):
        gradient = each.backward(gradient)  # type: ignore[arg-type]
        each.count()
    found = torch.zeros_like(vector)
    for stage, model in enumerate(models):
        paste(run.model, found, run.cuts[stage], model.gradient)
    assert passed[-1].loss == pytest.approx(loss.item(), rel=1e-6)
    assert float((found - whole.gradient).norm() / whole.gradient.norm()) < 1e-5

    plain_model = over(Transformer(plain(run.model)), merged(run.model, weights(), vector))
    assert plain_model.module.loss(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["adapter", "whole"])
def test_whoever_has_the_model_fetches_none_of_its_parts(tmp_path: Path, adapter: object) -> None:
    changes: dict[str, Any] = {} if adapter is not None else {"adapter": None, "method": {"type": "ddp"}}
    run, other = sealed(tmp_path, weights(), **changes), Home(tmp_path / "other")
    take_model(run, tmp_path / "model", other)
    for piece in range(run.num_pieces):
        wanted = run.of_stage(piece).base or run.of_stage(piece).initial
        assert other.blobs.open(wanted) is not None
    write_folder(tmp_path / "another", MODEL, initial_vector(MODEL, 4))
    with pytest.raises(ConfigError, match="its weights are not those that the run began with"):
        take_model(run, tmp_path / "another", Home(tmp_path / "third"))


def test_a_member_needs_room_for_its_part_of_the_base(tmp_path: Path) -> None:
    run = sealed(tmp_path, weights())
    holding, device = of_run(run), choose(PeerConfig(device="cpu"))
    for section in run.cuts:
        memory = section_memory(holding, section, num_members=ASSUMED_MEMBERS, num_taken=1).on_cpu
        base = 4 * num_section_parameters(plain(run.model), section)
        assert needed_nbytes(holding, section, device, num_taken=1)["cpu"] == memory + base


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter": {**ADAPTER, "dropout": 0.1}}, "adapter.dropout: stages compute with all"),
        ({"pipeline": {"split": {"by": "heads"}}, "method": {"type": "ddp"}}, "members of a team hold whole matrices"),
        ({"pipeline": {"activations": {"type": "subspace"}}, "method": {"type": "ddp"}}, "lies in no subspace"),
    ],
)
def test_what_stages_do_not_compute_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_file(**changes)


def test_a_run_that_does_not_say_what_parts_go_beside_is_refused(tmp_path: Path) -> None:
    run = sealed(tmp_path, weights())
    for bases in (msgspec.UNSET, run.bases[:-1]):  # type: ignore[index]
        with pytest.raises(ConfigError, match="bases: a run with stages has one of each"):
            msgspec.structs.replace(run, bases=bases)
    for name in ("base", "initial"):
        with pytest.raises(ConfigError, match="they name those of its parts"):
            msgspec.structs.replace(run, **{name: "ab" * 32})


def test_nobody_joins_a_stage_alone(tmp_path: Path) -> None:
    stage, home = sealed(tmp_path, weights()).of_stage(1), Home(tmp_path / "joins")
    home.blobs.put(encode(stage))
    node: Any = SimpleNamespace(run=stage.run)
    with pytest.raises(ConfigError, match="a stage of another"):
        asyncio.run(fetch_run(node, [], home, 1 << 30))
