"""A public model, SmolLM2, through weft into a GGUF file and back: its logits to four digits, and its tokens."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slow import smollm2

pytestmark = pytest.mark.slow
GIVEN = smollm2.file()
TEXT = "The capital of France is Paris. def f(x): return 1234 * x  # äöü\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_smollm2_is_the_same_after_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load, tokens = transformers.AutoModelForCausalLM.from_pretrained, transformers.AutoTokenizer.from_pretrained
    first, reader = smollm2.write_folder(GIVEN, tmp_path / "folder")
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
    theirs, ours = (gguf.GGUFReader(file).fields for file in (GIVEN, tmp_path / "out.gguf"))
    for name in ("tokens", "merges", "token_type", "eos_token_id", "bos_token_id"):
        key = f"tokenizer.ggml.{name}"
        assert ours[key].contents() == theirs[key].contents(), name
    assert ours["tokenizer.chat_template"].contents() == theirs["tokenizer.chat_template"].contents()
