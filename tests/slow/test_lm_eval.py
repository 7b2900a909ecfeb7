"""lm-evaluation-harness asks a served model over the API, and counts as `weft eval --tasks` does.

It needs the extra `lm-eval`.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unit.cli.test_tuned import MODEL, RUN
from weft.data.tokenizer import ByteTokenizer
from weft.model.initial import initial_vector
from weft.model.weights import write_folder

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
YAML = """
task: said
dataset_path: json
dataset_kwargs:
  data_files:
    test: %s
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["|"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
LOCAL = ("--host", "127.0.0.1", "--transports", "tls", "--device", "cpu", "--threads", "1", "--quiet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model that has learnt to say yes, and tasks of which yes answers every second."""
    write_folder(tmp_path / "model", MODEL, initial_vector(MODEL, 3), ByteTokenizer().to_json())
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    chats = [{"prompt": f"say {n}", "completion": "yes"} for n in range(60)]
    tasks = [{"question": f"say {n}", "answer": ("yes", "no")[n % 2]} for n in range(20)]
    for name, rows in (("chats.jsonl", chats), ("tasks.jsonl", tasks)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RUN.replace("NAME", "chat").replace("KIND", "conversations").replace("FILE", "chats.jsonl")
    text = text.replace("LOSS", "").replace("adapter =", "# adapter =").replace("6144", "24576")
    (tmp_path / "chat.toml").write_text(text)
    (tmp_path / "said.yaml").write_text(YAML % (tmp_path / "tasks.jsonl"))
    return tmp_path


def weft(folder: Path, *given: str) -> list[str]:
    return [sys.executable, "-m", "weft", "--home", str(folder / "home"), *given]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(weft(folder, "serve", "last", "--port", "0"), cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"http://127\.0\.0\.1:\d+/v1", (folder / "serve.log").read_text())) is None:
            assert process.poll() is None, (folder / "serve.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


def test_the_harness_counts_what_weft_counts(folder: Path) -> None:
    subprocess.run(weft(folder, "train", "chat.toml", *LOCAL), cwd=folder, check=True, timeout=300)
    asked = weft(folder, "eval", "last", "--tasks", "tasks.jsonl", "--max-tokens", "8", "--device", "cpu")
    own = subprocess.run(asked, cwd=folder, check=True, timeout=300, capture_output=True, text=True).stdout
    assert own.splitlines()[-1].split() == ["all", "20", "50", "%"]
    with served(folder) as address:
        with urllib.request.urlopen(f"{address}/models", timeout=30) as answer:
            (model,) = (each["id"] for each in json.load(answer)["data"])
        settings = f"model={model},base_url={address}/chat/completions,num_concurrent=4,tokenizer_backend=None"
        subprocess.run(
            [
                *(sys.executable, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", settings),
                *("--tasks", "said", "--include_path", str(folder), "--apply_chat_template"),
                *("--output_path", str(folder / "out")),
            ],
            cwd=folder,
            check=True,
            timeout=300,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")},
        )
    (written,) = (folder / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["results"]["said"]["exact_match,none"] == 0.5
