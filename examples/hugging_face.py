"""A Hugging Face Trainer as a peer: one callback, and a `with` around `train`.

    python examples/hugging_face.py                         # prints a ticket
    WEFT_TICKET=weft2... python examples/hugging_face.py    # elsewhere

It needs `pip install transformers accelerate`. A small BERT learns whether a made-up text holds the word 7; each
process makes texts of its own.
"""

import argparse
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import weft

BATCH, WORDS, LENGTH = 32, 32, 12


class WeftCallback(TrainerCallback):
    """Hands every optimizer step to `sync`, and ends the training when the run is complete."""

    def __init__(self, sync: weft.Sync) -> None:
        self.sync = sync

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: object
    ) -> TrainerControl:
        num_samples = args.train_batch_size * args.gradient_accumulation_steps  # of all GPUs of this process
        loss = state.log_history[-1].get("loss") if state.log_history else None
        if not self.sync.step(num_samples, loss):
            control.should_training_stop = True
        return control


class Texts(Dataset):
    """Texts of LENGTH words; every other one holds the word 7."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        luck = torch.Generator().manual_seed(self.seed * len(self) + number)
        words = torch.randint(8, WORDS, (LENGTH,), generator=luck)
        if number % 2:
            words[torch.randint(0, LENGTH, (1,), generator=luck)] = 7
        return {"input_ids": words, "labels": torch.tensor(number % 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticket", default=os.environ.get("WEFT_TICKET") or None, help="of a run to join")
    parser.add_argument("--home", help="folder of identity and checkpoints")
    parser.add_argument("--machine", help="TOML file with this machine's settings")
    parser.add_argument("--wait-for", type=int, default=1, help="peers with which to begin")
    parser.add_argument("--samples", type=int, default=40_000, help="of all peers together")
    parser.add_argument("--seed", type=int, default=0, help="of this process' texts")
    given = parser.parse_args()

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
        )
    )
    config = weft.SyncConfig(name="texts", samples=given.samples, batch_size=BATCH)
    machine = weft.Machine(home=given.home, settings=given.machine)
    with (
        tempfile.TemporaryDirectory() as folder,
        weft.Sync(model, config, ticket=given.ticket, wait_for=given.wait_for, machine=machine) as sync,
    ):
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=1 << 30,  # the run says when it is enough
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=Texts(given.seed), callbacks=[WeftCallback(sync)]).train()
        outcome = sync.finish()

    model.eval()
    texts = [Texts(12345)[number] for number in range(256)]
    answers = model(torch.stack([text["input_ids"] for text in texts]).to(model.device)).logits.argmax(1).cpu()
    right = (answers == torch.stack([text["labels"] for text in texts])).float().mean()
    print(f"{outcome.reason} after round {outcome.round}, {outcome.committed_tokens} samples")
    print(f"right: {right:.0%}")
    print(f"replica {outcome.replica}")


if __name__ == "__main__":
    main()
