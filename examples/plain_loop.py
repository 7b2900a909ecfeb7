"""A loop over a small convolutional network, and the lines (marked +) that make it a peer.

    python examples/plain_loop.py                         # prints a ticket
    WEFT_TICKET=weft2... python examples/plain_loop.py    # elsewhere, as often as you like

The pictures are made up: a bar that lies or stands, in noise. Each process makes other ones.
"""

import argparse
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import weft  # +
from weft.sync.method.presets import DiLoCoConfig, MethodConfig

BATCH = 32
METHOD = DiLoCoConfig(every=30)  # a round after so many steps of each


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def pictures(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield [BATCH, 1, 8, 8] pictures with their labels, for ever."""
    luck = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(BATCH, 1, 8, 8, generator=luck)
        label = torch.randint(0, 2, (BATCH,), generator=luck)
        place = torch.randint(0, 8, (BATCH,), generator=luck)
        for number in range(BATCH):
            bar = x[number, 0, place[number]] if label[number] else x[number, 0, :, place[number]]
            bar += 2.0
        yield x, label


def main(method: MethodConfig = METHOD) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticket", default=os.environ.get("WEFT_TICKET") or None, help="of a run to join")
    parser.add_argument("--home", help="folder of identity and checkpoints")
    parser.add_argument("--machine", help="TOML file with this machine's settings")
    parser.add_argument("--wait-for", type=int, default=1, help="peers with which to begin")
    parser.add_argument("--samples", type=int, default=40_000, help="of all peers together")
    parser.add_argument("--seed", type=int, default=0, help="of this process' pictures")
    given = parser.parse_args()

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    config = weft.SyncConfig(name="bars", samples=given.samples, batch_size=BATCH, method=method)  # +
    machine = weft.Machine(home=given.home, settings=given.machine)  # +
    with weft.Sync(net, config, ticket=given.ticket, wait_for=given.wait_for, machine=machine) as sync:  # +
        for x, label in pictures(given.seed):
            optimizer.zero_grad()
            loss = cross_entropy(net(x), label)
            loss.backward()
            optimizer.step()
            if not sync.step(len(x), loss):  # +
                break  # +
        outcome = sync.finish()  # +

    net.eval()
    x, label = next(pictures(12345))
    right = (net(x).argmax(1) == label).float().mean()
    print(f"{outcome.reason} after round {outcome.round}, {outcome.committed_tokens} samples")
    print(f"right: {right:.0%}")
    print(f"replica {outcome.replica}")


if __name__ == "__main__":
    main()
