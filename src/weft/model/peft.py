"""Adapters as the library PEFT has them, and merged into their base.

    adapter_config.json, adapter_model.safetensors  ──read_adapter──►  config, vector  ──write_adapter──►  the same

Which base it belongs to PEFT's config says by a name that means something on one machine alone. So weft writes the
digest of the base beside the tensors, where PEFT passes over it, and takes no other base. Of an adapter without one
every matrix has to be as the base has it, and people are told which base it names (`check_base`).
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
from jaxtyping import Float32
from msgspec import UNSET
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from weft import reading
from weft.errors import ConfigError
from weft.ids import Digest, short
from weft.model.adapter import Adapted, adapted
from weft.model.config import TARGETS, AdapterConfig, ModelConfig, plain
from weft.model.flat import layout, plain_vector
from weft.model.weights import own_name, read_bytes, whole_folder, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_DIGEST = "weft_base"  # in the metadata of the safetensors
_HOLDERS = {"attention": "self_attn", "ffn": "mlp"}
# What an adapter may have that weft does not compute, by the values that mean that it has not.
_WITHOUT: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    # These change the base, or what is computed, under the same names.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}


def merged(
    config: ModelConfig, base: Float32[Tensor, " frozen"], vector: Float32[Tensor, " num"]
) -> Float32[Tensor, " all"]:
    """Return the vector of the plain model that computes what the base and its adapter do: W + s B A.

    Of a model between the ends of a space: of those and its layers.
    """
    if config.has_frozen_ends:
        return plain_vector(config, base, vector)
    assert config.adapter is not UNSET
    whole, there = base.clone(), layout(plain(config))
    of_base = {span.name: span for span in there}
    for matrix, a, b in _pairs(config, vector):
        weight = there.view(whole, of_base[matrix.base])[matrix.rows.start : matrix.rows.stop]
        weight.addmm_(b, a, alpha=config.adapter.scale)
    return whole


def write_adapter(
    folder: Path, config: ModelConfig, vector: Float32[Tensor, " num"], base: Digest | None = None
) -> None:
    """Write an adapter as a folder that PEFT loads.

    Args:
        folder: is made, or is empty.
        base: what names the weights that it goes beside; None: it is not told.

    Raises:
        ConfigError: the folder is taken, or cannot be written.
        DiskFull: no room.
    """
    adapter = config.adapter
    assert adapter is not UNSET
    tree = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",  # who loads it names the model
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout or 0.0,
        "target_modules": sorted(adapter.targets),
        "use_rslora": adapter.is_rank_stabilized,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
    }
    tensors = dict[str, Tensor]()
    for matrix, a, b in _pairs(config, vector.detach().cpu()):
        tensors |= {
            f"{_theirs(matrix)}.lora_A.weight": a.contiguous(),
            f"{_theirs(matrix)}.lora_B.weight": b.contiguous(),
        }
    metadata = {"format": "pt"} | ({} if base is None else {BASE_DIGEST: base})
    with whole_folder(folder, last=CONFIG) as partial:
        (partial / WEIGHTS).write_bytes(save(tensors, metadata=metadata))
        write_json(partial / CONFIG, tree)


def read_adapter_config(folder: Path, base: ModelConfig) -> ModelConfig:
    """Return the model that is `base` with the adapter of a folder, of which the weights are not read.

    Raises:
        ConfigError: as `read_adapter`.
    """
    return msgspec.structs.replace(base, adapter=_adapter(folder / CONFIG))


def read_adapter(folder: Path, base: ModelConfig) -> tuple[ModelConfig, Float32[Tensor, " num"]]:
    """Return the model that is `base` with the adapter of a folder, and the adapter's vector.

    Raises:
        ConfigError: no adapter of PEFT's, one that weft cannot compute, or one of another base; says which tensor.
    """
    config = read_adapter_config(folder, base)
    wanted = dict[str, Tensor]()
    vector = torch.empty(layout(config).num_parameters)
    for matrix, a, b in _pairs(config, vector):
        wanted |= {f"{_theirs(matrix)}.lora_A.weight": a, f"{_theirs(matrix)}.lora_B.weight": b}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as reader:
            names = set(reader.keys())
            if names != wanted.keys():
                other = sorted(names ^ wanted.keys())[0]
                raise ConfigError(
                    f"{folder / WEIGHTS}: tensor {other} is {'too many' if other in names else 'missing'}. The adapter "
                    "belongs to another base, or is of a kind that weft does not know."
                )
            for name, view in wanted.items():
                tensor = reader.get_tensor(name)
                if not tensor.is_floating_point():
                    raise ConfigError(f"{folder / WEIGHTS}: tensor {name} is of {tensor.dtype}, which is no adapter's.")
                if tensor.shape != view.shape:
                    raise ConfigError(
                        f"{folder / WEIGHTS}: tensor {name} has shape {list(tensor.shape)}, and with this base it "
                        f"would have {list(view.shape)}. The adapter belongs to another base."
                    )
                view.copy_(tensor)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{folder / WEIGHTS}: cannot be read as safetensors: {error}. Download it again.") from None
    if not torch.isfinite(vector).all():
        raise ConfigError(f"{folder / WEIGHTS}: it holds numbers that are not finite. Download it again.")
    return config, vector


def check_base(folder: Path, model: Path, base: Digest) -> str:
    """Return what people are told where nobody knows whether an adapter belongs to a model; empty: it does.

    Args:
        folder: of an adapter, as `read_adapter` takes it.
        model: the folder of the model that it is to go beside.
        base: what names that model's weights.

    Raises:
        ConfigError: it was trained beside another model, or a file cannot be read.
    """
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as reader:
            told = (reader.metadata() or {}).get(BASE_DIGEST)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{folder / WEIGHTS}: cannot be read as safetensors: {error}. Download it again.") from None
    if told is not None and told != base:
        raise ConfigError(
            f"{folder / WEIGHTS}: the adapter was trained beside other weights ({told:.8}) than those of {model} "
            f"({short(base)}). Name the folder of the model that it was trained beside: model.path."
        )
    theirs, here = _tree(folder / CONFIG).get("base_model_name_or_path"), own_name(model)
    if told is not None or (theirs and theirs == here):
        return ""
    named = f"names its base {theirs!r:.120}" if theirs else "does not name its base"
    called = f"calls itself {here!r:.120}" if here else "does not say its name"
    return (
        f"the adapter {folder} {named}, and the model {model} {called}: whether they belong together is not known, for "
        "only names and shapes of matrices were compared"
    )


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = reading.json_of(read_bytes(file))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}.") from None
    if not isinstance(tree, dict) or tree.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: no LoRA adapter of PEFT's, which is what weft reads.")
    return tree


def _adapter(file: Path) -> AdapterConfig:
    tree = _tree(file)
    for name, allowed in _WITHOUT.items():
        if tree.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"{file}: {name} is {tree[name]!r:.80}, which weft does not compute. Allowed: {allowed[0]!r}."
            )
    targets = tree.get("target_modules")
    if targets == "all-linear":
        targets = TARGETS
    if isinstance(targets, list):  # each may be a whole path: layers that have none are found missing among tensors
        targets = sorted({each.rpartition(".")[2] if isinstance(each, str) else "" for each in targets})
    if not isinstance(targets, list | tuple) or not targets or not all(target in TARGETS for target in targets):
        raise ConfigError(
            f"{file}: target_modules is {targets!r:.200}, and weft knows adapters of {', '.join(TARGETS)}, or "
            "all-linear."
        )
    fields = {
        "rank": tree.get("r"),
        "alpha": tree.get("lora_alpha"),
        "targets": [target for target in TARGETS if target in targets],
        "is_rank_stabilized": bool(tree.get("use_rslora")),
        **({"dropout": tree["lora_dropout"]} if tree.get("lora_dropout") else {}),
    }
    try:
        return msgspec.convert(fields, AdapterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}.") from None


def _pairs(config: ModelConfig, vector: Tensor) -> "list[tuple[Adapted, Tensor, Tensor]]":
    """Return each matrix that has an adapter, with its A and B, views into `vector`."""
    there = layout(config)
    spans = {span.name: span for span in there}
    return [
        (matrix, *(there.view(vector, spans[f"{matrix.path}.{side}"]) for side in "ab"))  # type: ignore[misc]
        for layer in range(config.num_layers)
        for matrix in adapted(config, layer)
    ]


def _theirs(matrix: Adapted) -> str:
    holder = _HOLDERS[matrix.holder.partition(".")[0]]
    return f"base_model.model.model.layers.{matrix.layer}.{holder}.{matrix.name}"
