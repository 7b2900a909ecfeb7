"""LoRA is PEFT's: twenty steps give its adapter, a folder of either is loaded by the other.

PEFT is no dependency: `pip install --target FOLDER peft accelerate`, and FOLDER in PYTHONPATH.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from weft.ids import Digest
from weft.model.config import TARGETS, AdapterConfig, ModelConfig
from weft.model.flat import assemble, over
from weft.model.initial import initial_vector
from weft.model.peft import read_adapter, write_adapter
from weft.model.transformer import Transformer
from weft.model.weights import write_folder
from weft.sync.method.choices import AdamWConfig
from weft.training import optimizer as inner

peft = pytest.importorskip("peft", reason="the package peft is not installed")
transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their warnings are theirs

BASE = ModelConfig(vocab_size=97, num_layers=2, num_heads=4, num_kv_heads=2, width=32, ffn_width=64, max_seq_len=64)
STEPS, LR = 20, 1e-3
KINDS: list[dict[str, Any]] = [
    {"rank": 4, "alpha": 8.0},
    {"rank": 8, "alpha": 16.0, "targets": ("q_proj", "v_proj"), "is_rank_stabilized": True},
]


@pytest.fixture(params=KINDS, ids=["all", "queries and values, stabilized"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    torch.set_num_threads(1)
    return msgspec.structs.replace(BASE, adapter=AdapterConfig(**request.param))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "base", BASE, base(), None)
    return tmp_path


def base() -> Tensor:
    return initial_vector(BASE, 3) * 3


def batches() -> Tensor:
    return torch.randint(0, BASE.vocab_size, (STEPS, 4, 33), generator=torch.Generator().manual_seed(6))


def theirs(folder: Path, adapter: str, *, is_trainable: bool) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder / adapter, is_trainable=is_trainable)


def trained(config: ModelConfig, vector: Tensor) -> Tensor:
    """Return the adapter after so many steps of weft's."""
    model = over(Transformer(config), vector.clone(), base())
    optimizer = inner.build(AdamWConfig(weight_decay=0.1), model)
    for ids in batches():
        model.zero_gradient()
        model.module.loss(ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step(LR)
    return model.vector.clone()


def trained_there(model: Any) -> None:
    """Make the same steps with torch's AdamW."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for ids in batches():
        optimizer.zero_grad()
        model(input_ids=ids[:, :-1], labels=ids[:, :-1], shift_labels=ids[:, 1:].contiguous()).loss.backward()
        optimizer.step()


def test_after_twenty_steps_the_adapter_is_theirs(folder: Path, config: ModelConfig) -> None:
    first = initial_vector(config, 5)
    write_adapter(folder / "first", config, first)
    model = theirs(folder, "first", is_trainable=True)
    trained_there(model)
    model.save_pretrained(folder / "theirs")
    found, expected = read_adapter(folder / "theirs", BASE)
    assert found == msgspec.structs.replace(config, adapter=found.adapter)
    ours = trained(config, first)
    assert (ours - first).abs().max() > 10 * LR
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_an_exported_adapter_gives_the_same_logits_in_peft(folder: Path, config: ModelConfig) -> None:
    vector = trained(config, initial_vector(config, 5))
    write_adapter(folder / "ours", config, vector, Digest("0" * 64))  # the base's name is nothing to them
    ids = batches()[0]
    with torch.no_grad():
        found = theirs(folder, "ours", is_trainable=False)(input_ids=ids).logits
        expected = assemble(config, vector, base())(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_peft_made_goes_on_in_weft(folder: Path, config: ModelConfig) -> None:
    assert config.adapter
    adapter = config.adapter
    targets = "all-linear" if adapter.targets == TARGETS else list(adapter.targets)
    settings = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=targets,
        use_rslora=adapter.is_rank_stabilized,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    torch.manual_seed(0)  # where a gradient is nearly 0, AdamW makes a whole step of its rounding
    model = peft.get_peft_model(plain, settings)
    trained_there(model)
    model.save_pretrained(folder / "theirs")
    found, vector = read_adapter(folder / "theirs", BASE)
    assert found == config
    trained_there(model)
    model.save_pretrained(folder / "again")
    # Their optimizer began anew, as weft's does.
    torch.testing.assert_close(trained(found, vector), read_adapter(folder / "again", BASE)[1], rtol=0, atol=1e-5)
