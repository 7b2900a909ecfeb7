"""Fine-tuning on conversations is what TRL's SFTTrainer does: the same tokens are trained on, to the same losses.

TRL is no dependency: `pip install --target FOLDER trl datasets accelerate peft`, and FOLDER in PYTHONPATH.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from msgspec.structs import replace
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from unit.peer.tiny import run_config
from weft.chat.conversations import Conversation, conversations
from weft.chat.packing import pack_conversations
from weft.chat.rendering import Renderer
from weft.chat.template import Template
from weft.chat.vocabulary import Vocabulary
from weft.clock import VirtualClock
from weft.data.batch import Batches
from weft.data.corpus import ConversationsSource, PreferencesSource
from weft.data.rows import UNTRAINED, Batch
from weft.data.store import ShardStore
from weft.data.tokenizer import JsonTokenizer
from weft.errors import DataError
from weft.events import Event, StepDone
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.weights import read_folder, write_folder
from weft.run.config import DpoConfig
from weft.run.frozen import Frozen
from weft.run.machine import PeerConfig
from weft.sync.method.presets import FedAvgConfig
from weft.sync.method.schedule import ConstantConfig
from weft.training.trainer import Trainer

trl = pytest.importorskip("trl", reason="the package trl is not installed")
transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their warnings are theirs

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = ("cohere", "deepseekv3", "gemma", "glm4moe", "llama3", "phi3", "qwen2_5", "qwen3")
REFUSED = ("deepseekv3",)  # it asks for an answer with <think>, and writes answers without
OTHERWISE = ("glm4moe", "qwen3")  # TRL's, with marks, keep in earlier answers what the models' own leave out
NUM, SEQ_LEN, BATCH_SIZE, STEPS, LR = 200, 192, 4, 20, 1e-3
PAIR_LEN = 2 * SEQ_LEN
BOS, EOS = "<s>", "</s>"
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": BATCH_SIZE,
    "max_steps": STEPS,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "logging_strategy": "steps",
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "max_length": PAIR_LEN,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def drawn(num: int, least_words: int, most_words: int) -> list[list[dict[str, str]]]:
    """Return conversations of one to three turns, some with a system message, of words by chance."""
    generator, words = (
        np.random.default_rng(5),
        ["It", "is", "four.", "Sure,", "what", "\n\nNo", "1+1", "été", "  x", "?"],
    )

    def text() -> str:
        return " ".join(generator.choice(words, generator.integers(least_words, most_words)))

    found = []
    for number in range(num):
        turns = [
            {"role": role, "content": text().strip()} for _ in range(1 + number % 3) for role in ("user", "assistant")
        ]
        found.append([{"role": "system", "content": text().strip()}, *turns] if number % 2 and number % 4 else turns)
    return found


def tokenizer_of(source: str) -> tuple[bytes, Any]:
    """Return a tokenizer that knows a template's control tokens: its JSON, and transformers' own."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    engine.train_from_iterator(["It is what it is.\n\nSure, sure. " * 20], trainer)
    found = re.findall(r"<\|?[\w/｜▁ |-]+?\|?>|\[/?[A-Z]+\]", source)
    names = dict.fromkeys((BOS, EOS, *(name for name in found if "|" in name or "_of_turn" in name or "｜" in name)))
    engine.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    return engine.to_str().encode(), theirs


def masks(source: str, chats: list[list[dict[str, str]]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens that TRL trains with, and which of them it trains on: what transformers finds by the marks."""
    _, theirs = tokenizer_of(source)
    for messages in chats:
        found = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        yield found["input_ids"], found["assistant_masks"]


def rendered(source: str, tokens_of: str, chats: list[list[dict[str, str]]]) -> Iterator[tuple[list[int], list[int]]]:
    json_bytes, _ = tokenizer_of(tokens_of)
    renderer = Renderer(
        Template(source, {"bos_token": BOS, "eos_token": EOS}), Vocabulary(JsonTokenizer(json_bytes, None)), 0.0
    )
    for number, messages in enumerate(chats):
        found = renderer.render(Conversation(str(number), f"number {number}", tuple(messages)))
        yield found.ids.tolist(), found.is_trained.astype(int).tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_tokens_are_trained_on_by_the_marks_of_public_templates(name: str) -> None:
    source = (FOLDER / f"{name}_training.jinja").read_text()
    chats = chats_for(name, drawn(NUM, 1, 12))
    assert "{% generation" in source or "{%- generation" in source
    for ours, theirs in zip(rendered(source, source, chats), masks(source, chats), strict=True):
        assert ours == theirs
        assert 0 < sum(ours[1]) < len(ours[1])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in (*REFUSED, *OTHERWISE)])
def test_where_a_template_has_no_marks_its_turns_say_the_same(name: str) -> None:
    marked, bare = ((FOLDER / f"{name}{kind}.jinja").read_text() for kind in ("_training", ""))
    chats = chats_for(name, drawn(NUM, 1, 12))
    _, theirs = tokenizer_of(marked)
    for ours, (ids, mask) in zip(rendered(bare, marked, chats), masks(marked, chats), strict=True):
        assert ours[0] == ids
        differing = [ids[at] for at in range(len(ids)) if ours[1][at] != mask[at]]
        # What may differ is white space between an answer's end mark and the next turn, which is the template's.
        assert all(not theirs.decode([each]).strip() for each in differing)
        assert len(differing) <= sum(ours[1])


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_asks_otherwise_than_it_writes_is_refused_without_marks(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    with pytest.raises(DataError, match="Mark in the template what is trained on"):
        next(rendered(source, source, drawn(1, 1, 12)))


def chats_for(name: str, chats: list[list[dict[str, str]]]) -> list[list[dict[str, str]]]:
    """Return what a template takes: Gemma's refuses system messages."""
    return [messages[1:] if name == "gemma" and messages[0]["role"] == "system" else messages for messages in chats]


# --- training ---

SOURCE = (FOLDER / "qwen2_5_training.jinja").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    json_bytes, theirs = tokenizer_of(SOURCE)
    config = ModelConfig(
        vocab_size=theirs.vocab_size + len(theirs.get_added_vocab()),
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        width=32,
        ffn_width=64,
        max_seq_len=PAIR_LEN,
    )
    write_folder(tmp_path / "model", config, initial_vector(config, 3), json_bytes)
    theirs.chat_template = SOURCE
    theirs.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(json_bytes)
    # Each is longer than half a row, so that a row holds one, and both see the same batches.
    chats = [chat for chat in drawn(600, 12, 25) if SEQ_LEN // 2 < length_of(theirs, chat) <= SEQ_LEN]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return tmp_path


def length_of(tokenizer: Any, messages: list[dict[str, str]]) -> int:
    return len(
        tokenizer.apply_chat_template(messages, chat_template=SOURCE, tokenize=True, return_dict=True)["input_ids"]
    )


def ours(folder: Path) -> tuple[list[float], list[dict[str, list[int]]]]:
    """Return the losses of so many steps, and what was trained on in each sample, in order."""
    config, vector = read_folder(folder / "model")
    tokenizer = JsonTokenizer.from_file(folder / "model")
    store, source = ShardStore(folder / "store"), ConversationsSource(paths=("chats.jsonl",))
    template = Template(SOURCE, {"bos_token": BOS, "eos_token": EOS})
    index, told = pack_conversations(store, source, 0.05, template, tokenizer, SEQ_LEN, folder)
    assert str(told) == ""
    schedule = ConstantConfig(lr=LR, warmup_tokens=0)
    run = run_config(FedAvgConfig(every=STEPS), config, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, schedule=schedule)
    run = replace(run, data=index)
    events, batches = list[Event](), Batches(store, index, "train", SEQ_LEN, run.seed)
    trainer = Trainer(run, PeerConfig(device="cpu", threads=1), batches, events.append, VirtualClock())
    trainer.start(vector)
    positions = np.arange(STEPS * BATCH_SIZE)
    trainer.train(positions, 0, 1)
    samples = []
    batch = batches.at(positions)
    assert batch.positions is not None
    for tokens, targets, places in zip(*batch, strict=True):
        stops = [*torch.nonzero(places == 0).flatten().tolist()[1:], SEQ_LEN]
        labels = [UNTRAINED, *targets[: stops[0] - 1].tolist()]
        assert all(each == UNTRAINED for each in targets[stops[0] :].tolist()), "a row holds one conversation"
        samples.append({"input_ids": tokens[: stops[0]].tolist(), "labels": labels})
    return [event.loss for event in events if isinstance(event, StepDone)], samples


def test_losses_of_twenty_steps_are_those_of_their_trainer(folder: Path) -> None:
    found, samples = ours(folder)
    expected = theirs(folder, samples)
    assert len(found) == len(expected) == STEPS
    assert found[-1] < found[0] - 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def theirs(folder: Path, samples: list[dict[str, list[int]]]) -> list[float]:
    """Return the losses of SFTTrainer on the same conversations in the same order."""
    import datasets

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    by_ids = {}
    for each in conversations(["chats.jsonl"], folder):
        messages = [dict(message) for message in each.messages]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        by_ids[tuple(ids)] = messages
    rows = [{"messages": by_ids[tuple(sample["input_ids"])]} for sample in samples]

    class InOrder(trl.SFTTrainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(dataset if dataset is not None else self.train_dataset)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    settings = trl.SFTConfig(
        **SETTINGS, output_dir=str(folder / "out"), packing=False, assistant_only_loss=True, shuffle_dataset=False
    )
    trainer = InOrder(
        model=model, args=settings, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# --- preferences ---


@pytest.fixture
def pairs(folder: Path) -> Path:
    """Return the folder, in which are pairs of answers, of which a row holds one."""
    chats = pairwise(drawn(600, 6, 12))
    rows = [{"prompt": chat[-2:-1], "chosen": chat[-1:], "rejected": other[-1:]} for chat, other in chats]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    lengths = [
        sum(length_of(tokenizer, [*row["prompt"], *row[side]]) for side in ("chosen", "rejected")) for row in rows
    ]
    kept = [row for row, length in zip(rows, lengths, strict=True) if PAIR_LEN // 2 < length <= PAIR_LEN]
    assert len(kept) > 1.2 * BATCH_SIZE * STEPS
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return folder


def test_losses_of_twenty_steps_on_preferences_are_those_of_their_trainer(pairs: Path) -> None:
    config, vector = read_folder(pairs / "model")
    tokenizer = JsonTokenizer.from_file(pairs / "model")
    store, source = ShardStore(pairs / "store"), PreferencesSource(paths=("pairs.jsonl",))
    template = Template(SOURCE, {"bos_token": BOS, "eos_token": EOS})
    index, _ = pack_conversations(store, source, 0.05, template, tokenizer, PAIR_LEN, pairs)
    schedule = ConstantConfig(lr=LR, warmup_tokens=0)
    run = run_config(FedAvgConfig(every=STEPS), config, seq_len=PAIR_LEN, batch_size=BATCH_SIZE, schedule=schedule)
    run = replace(run, data=index, train=replace(run.train, loss=DpoConfig(beta=0.1)))
    events, batches = list[Event](), Batches(store, index, "train", PAIR_LEN, run.seed)
    frozen = Frozen(reference=vector.clone())
    trainer = Trainer(run, PeerConfig(device="cpu", threads=1), batches, events.append, VirtualClock(), lambda: frozen)
    trainer.start(vector)
    positions = np.arange(STEPS * BATCH_SIZE)
    trainer.train(positions, 0, 1)
    found = [event.loss for event in events if isinstance(event, StepDone)]
    expected = theirs_of_pairs(pairs, list(pairs_in(batches.at(positions))))
    assert len(found) == len(expected) == STEPS
    assert max(found) - min(found) > 0.1, "the model has moved"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def pairs_in(batch: Batch) -> Iterator[dict[str, list[int]]]:
    """Yield the tokens of each pair, as their trainer has them."""
    assert batch.positions is not None
    for tokens, targets, places in zip(*batch, strict=True):
        starts = [*torch.nonzero(places == 0).flatten().tolist(), PAIR_LEN]
        texts = [range(start, stop) for start, stop in pairwise(starts)][:2]
        answers = [[at for at in text if targets[at] != UNTRAINED] for text in texts]
        assert all(targets[texts[1].stop :] == UNTRAINED), "a row holds one pair"
        sides = [tokens[answer[0] + 1 : answer[-1] + 2].tolist() for answer in answers]
        prompt = tokens[texts[0].start : answers[0][0] + 1].tolist()
        assert prompt == tokens[texts[1].start : answers[1][0] + 1].tolist()
        yield {"prompt_ids": prompt, "chosen_ids": sides[0], "rejected_ids": sides[1]}


def theirs_of_pairs(folder: Path, rows: list[dict[str, list[int]]]) -> list[float]:
    """Return the losses of DPOTrainer on the same tokens in the same order."""
    import datasets

    class InOrder(trl.DPOTrainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def _prepare_dataset(self, dataset: Any, *_arguments: Any) -> Any:
            return dataset

    model, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2)
    )
    trainer = InOrder(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(**SETTINGS, output_dir=str(folder / "out"), beta=0.1),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
