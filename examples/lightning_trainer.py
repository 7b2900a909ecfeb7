"""A Lightning Trainer as a peer: one callback, and a `with` around `fit`.

    python examples/lightning_trainer.py                         # prints a ticket
    WEFT_TICKET=weft2... python examples/lightning_trainer.py    # elsewhere

It needs `pip install lightning`. A perceptron learns whether two made-up points lie on one side of a plane; each
process makes points of its own.
"""

import argparse
import logging
import os
from collections.abc import Iterator

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

import weft

BATCH = 32


class WeftCallback(lightning.Callback):
    """Hands every batch, which is an optimizer step, to `sync`, and ends the training when the run is complete."""

    def __init__(self, sync: weft.Sync) -> None:
        self.sync = sync

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: dict[str, Tensor],
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        if not self.sync.step(len(batch[0]), outputs["loss"]):
            trainer.should_stop = True


class Points(IterableDataset):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        luck = torch.Generator().manual_seed(self.seed)
        while True:
            x = torch.randn(6, generator=luck)
            yield x, (x[:3].sum() * x[3:].sum() > 0).long()


class Sides(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticket", default=os.environ.get("WEFT_TICKET") or None, help="of a run to join")
    parser.add_argument("--home", help="folder of identity and checkpoints")
    parser.add_argument("--machine", help="TOML file with this machine's settings")
    parser.add_argument("--wait-for", type=int, default=1, help="peers with which to begin")
    parser.add_argument("--samples", type=int, default=40_000, help="of all peers together")
    parser.add_argument("--seed", type=int, default=0, help="of this process' points")
    given = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Sides()
    config = weft.SyncConfig(name="sides", samples=given.samples, batch_size=BATCH)
    machine = weft.Machine(home=given.home, settings=given.machine)
    with weft.Sync(module, config, ticket=given.ticket, wait_for=given.wait_for, machine=machine) as sync:
        trainer = lightning.Trainer(
            max_epochs=-1,  # the run says when it is enough
            callbacks=[WeftCallback(sync)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Points(given.seed), batch_size=BATCH))
        outcome = sync.finish()

    x, label = next(iter(DataLoader(Points(12345), batch_size=1024)))
    right = (module.net(x).argmax(1) == label).float().mean()
    print(f"{outcome.reason} after round {outcome.round}, {outcome.committed_tokens} samples")
    print(f"right: {right:.0%}")
    print(f"replica {outcome.replica}")


if __name__ == "__main__":
    main()
