"""An adapter by four machines, of which one is killed and one comes later, against one process of as many tokens.

    python -m benchmarks.tuning FOLDER                               # of a chat model, such as SmolLM2-135M-Instruct
    python -m benchmarks.tuning FOLDER --conversations 500 --passes 2

Conversations are tasks whose answers can be checked (`rig.tasks`). The model as it came, the one of one process and the
one of four are each exported, served by `weft serve`, and asked questions that were not trained on, by OpenAI's client
at temperature 0. One process makes plain steps of AdamW (`fedavg` of one). Four make fewer steps one after the other
with the same tokens, so each takes half as many samples a step, at twice the rate, and they synchronise twice as often
in half the bits (docs/log.md has what else was tried). Bytes are what the maker of the run sent and received, against a
ring of the whole model's gradients in bf16 at each step of as many samples as the one process takes; all have the
model's folder before. All machines share the cores of this one.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import psutil

from benchmarks import report
from benchmarks._company import SOURCE, Company, until
from benchmarks.rig.namespaces import Lines
from benchmarks.rig.served import NAME, Served
from benchmarks.rig.tasks import Task, conversation, drawn
from weft.cost.training import ring_ddp_traffic
from weft.events import RoundCommitted
from weft.model.config import num_parameters
from weft.model.weights import read_config

MBIT, NUM_PEERS, AT_ONCE, MAX_TOKENS = 100.0, 4, 8, 48
SEQ_LEN = 256
MOST_BEHIND, LEAST_FEWER = 0.01, 200  # the aims: accuracy of four below that of one; bytes of full training over theirs
END_S = 3 * 3600.0


@dataclass(frozen=True)
class Training:
    batch_size: int
    every: int
    lr: float
    method: str

    def num_rounds(self, tokens: int, num: int) -> int:
        return tokens // (SEQ_LEN * self.batch_size * self.every * num)


ALONE = Training(2, 5, 1e-3, '{type = "fedavg", every = 5}')
TOGETHER = Training(1, 5, 2e-3, '{type = "diloco", every = 5, lr = 0.7, momentum = 0.5, codec = {type = "e3m0"}}')
RUN = """
name = "tuning"
peers = {peers}
model = {{type = "folder", path = {model}}}
tokenizer = {{type = "json", path = {model}}}
adapter = {{type = "lora", rank = 16}}
data = {{source = {{type = "conversations", paths = ["chats.jsonl"]}}, heldout_fraction = 0.02}}
method = {method}
[train]
seq_len = {seq_len}
batch_size = {batch_size}
tokens = {tokens}
evaluate_every = 0
evaluate_windows = 8
schedule = {{type = "cosine", lr = {lr}, warmup_tokens = {warmup}, total_tokens = {tokens}}}
"""


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning")
    parser.add_argument("model", type=Path, help="folder of a chat model")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--passes", type=float, default=1.0, help="over the conversations")
    parser.add_argument("--questions", type=int, default=400)
    asked = parser.parse_args(words)
    load, questions = report.load(), drawn(2, asked.questions)
    with TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps(conversation(task)) for task in drawn(1, asked.conversations)]
        model = asked.model.resolve()
        rows: list[tuple[Any, ...]] = [("as it came", *_asked(folder, model, questions), None, None, None)]
        for what, num in (("one process", 1), (f"{NUM_PEERS} machines", NUM_PEERS)):
            here = folder / f"of{num}"
            here.mkdir()
            (here / "chats.jsonl").write_text("\n".join(lines))
            tokens = round(asked.passes * _num_tokens(here, model))
            made, nbytes, cpu_s = _trained(here, model, num, tokens)
            num_steps = tokens // (SEQ_LEN * ALONE.batch_size * num)
            full = ring_ddp_traffic(num_parameters(read_config(model)), num, num_steps)
            times = (full.sent_nbytes + full.received_nbytes) / nbytes if num > 1 else None
            rows.append((what, *_asked(here, made, questions), nbytes if num > 1 else None, times, cpu_s))
    header = ("", "right", *_kinds(questions), "bytes of one machine", "full training, times", "CPU s")
    told = [report.table(header, [[_shown(cell) for cell in row] for row in rows])]
    one, four = rows[1], rows[2]
    behind, times = one[1] - four[1], four[-2]
    told.append(
        f"The aims: at most {100 * MOST_BEHIND:.0f} point below one process, **{_met(behind <= MOST_BEHIND)}**; "
        f"at most 1/{LEAST_FEWER} of the bytes of full training, **{_met(bool(times and times >= LEAST_FEWER))}**."
    )
    told.append(report.load_line(load))
    report.write(
        "tuning", "An adapter by four machines", " ".join(["python -m benchmarks.tuning FOLDER", *words[1:]]), told
    )


def _met(is_so: bool) -> str:
    return "met" if is_so else "missed"


def _shown(cell: object) -> object:
    return "" if cell is None else cell


def _kinds(questions: Sequence[Task]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(task.kind for task in questions))


def _num_tokens(folder: Path, model: Path) -> int:
    """Return how many tokens of rows a pass over the conversations has."""
    from weft.chat.packing import pack_conversations
    from weft.chat.template import template_of
    from weft.data.corpus import ConversationsSource
    from weft.data.store import ShardStore
    from weft.data.tokenizer import JsonTokenizer
    from weft.model.came_with import read

    tokenizer = JsonTokenizer.from_file(model)
    template = template_of(read(model, model, read_config(model).vocab_size, print))
    assert template is not None, "the model has no chat template"
    source = ConversationsSource(paths=("chats.jsonl",))
    index, _ = pack_conversations(ShardStore(folder / "counted"), source, 0.02, template, tokenizer, SEQ_LEN, folder)
    return index.num_tokens("train")


def _trained(folder: Path, model: Path, num: int, tokens: int) -> tuple[Path, int, float]:
    """Return the merged model, bytes that the maker moved, and the CPU-seconds of all machines."""
    training = TOGETHER if num > 1 else ALONE
    text = RUN.format(
        peers=num, method=training.method, model=json.dumps(str(model)), seq_len=SEQ_LEN,
        batch_size=training.batch_size, tokens=tokens, lr=training.lr, warmup=tokens // 20,
    )  # fmt: skip
    began, spent = time.monotonic(), dict[int, float]()
    with Lines("weft-tuning", num + 1, mbit=MBIT) as lines, Company(lines, folder, text) as company:
        has_it = ("--model", str(model))  # as in life: whoever tunes a model has it
        company.found(num, *has_it)
        maker = company.machines[0]
        rounds = training.num_rounds(tokens, num)
        if num > 1 and rounds < 4:
            raise SystemExit(f"{rounds} rounds are too few to lose a machine and to get another: give more --passes.")
        if num > 1:
            _until_round(company, rounds // 3)
            company.end(company.machines[1])
            _until_round(company, rounds // 2)
            company.join(num, *has_it)
        while maker.process.poll() is None:
            for machine in company.machines:
                if machine.process.poll() is None:
                    times = psutil.Process(machine.process.pid).cpu_times()
                    spent[machine.number] = times.user + times.system
            if time.monotonic() - began > END_S:
                raise RuntimeError(f"not done after {END_S:.0f} s")
            time.sleep(1.0)
        if maker.process.returncode:
            raise RuntimeError(maker.home.with_suffix(".err").read_text()[-2000:])
        commits = [entry.event for entry in maker.said(RoundCommitted)]
        nbytes = sum(each.sent_nbytes + each.received_nbytes for each in commits if isinstance(each, RoundCommitted))
        env = os.environ | {"PYTHONPATH": str(SOURCE)}
        command = [
            sys.executable,
            "-P",
            "-m",
            "weft",
            "--home",
            str(maker.home),
            "export",
            "last",
            str(folder / "merged"),
        ]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return folder / "merged", nbytes, sum(spent.values())


def _until_round(company: Company, number: int) -> None:
    maker = company.machines[0]
    until(lambda: len(maker.said(RoundCommitted)) >= number or maker.process.poll() is not None, f"round {number}")


def _asked(folder: Path, model: Path, questions: Sequence[Task]) -> tuple[float, ...]:
    """Return the share of all questions that a model answers rightly, and of each kind."""
    right, asked = Counter[str](), Counter(task.kind for task in questions)
    with Served(folder, model, {"tuner": {"concurrent": AT_ONCE}}) as served:
        client = openai.OpenAI(
            base_url=f"http://{served.host}:{served.port}/v1", api_key=served.secrets["tuner"], timeout=600.0
        )

        def answer(task: Task) -> bool:
            made = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": task.asked}], temperature=0.0, max_tokens=MAX_TOKENS
            )
            return task.is_right(made.choices[0].message.content or "")

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for task, is_right in zip(questions, pool.map(answer, questions), strict=True):
                right[task.kind] += is_right
    return (right.total() / len(questions), *(right[kind] / asked[kind] for kind in _kinds(questions)))


if __name__ == "__main__":
    main(sys.argv[1:])
