"""One rank of sites, one after the other: `python program.py KINDS RANK RANKS FOLDER`, `vectors,half` for KINDS, say.

Rank 0 checks, and prints the kind and what it found; the others do what it tells.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from unit.peer.tiny import batches, rows_batches, rows_run, run_config
from weft.clock import VirtualClock
from weft.codec.build import build
from weft.codec.config import Bf16Config, CodecConfig, Int4Config, Int8Config, RandomKConfig, TopKConfig
from weft.data.batch import Batches
from weft.data.rows import UNTRAINED
from weft.data.tokenizer import ByteTokenizer
from weft.errors import CheckpointError, ConfigError, NotFinite
from weft.events import Event, StepDone
from weft.model.initial import initial_vector
from weft.peer.state.checkpoint import read_vectors, write_vectors
from weft.ranks.launch import require_alike
from weft.ranks.learner import SiteLearner
from weft.ranks.line import Line
from weft.ranks.site import Site, serve
from weft.ranks.strips import CHUNK
from weft.ranks.vector import spread
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.store.chunks import chunk_digests, replica_digest
from weft.sync.merge import outer as optimizers
from weft.sync.merge.outer import StepContext
from weft.sync.merge.reduce import decode_parts, encode_parts, encode_with_feedback
from weft.sync.merge.sharded import alike, gathered
from weft.sync.method.choices import (
    AdamWConfig,
    DelayedNesterovConfig,
    InnerSgdConfig,
    NesterovConfig,
    OuterConfig,
    SgdConfig,
)
from weft.sync.method.presets import FedAvgConfig
from weft.sync.records.parts import cut
from weft.training.trainer import Trainer

NUM = 4 * CHUNK + 50_000  # a vector of four whole chunks and a short one
SETTINGS = PeerConfig(device="cpu", threads=1)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # a step is of 1e-2, and hangs on last bits where a gradient is next to nothing


def drawn(seed: int, num: int = NUM) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def is_same(spread_one: Tensor, plain: Tensor) -> bool:
    return torch.equal(gathered(spread_one), plain)


# --- vectors ---


def check_arithmetic(site: Site) -> None:
    """Plain arithmetic has the bits that it has on plain vectors."""
    a, b = drawn(1), drawn(2)
    there, other = spread(site, a), spread(site, b)
    assert is_same(there, a)
    assert is_same(there - other, a - b)
    assert is_same(there - b, a - b)  # a plain vector is spread where it meets another
    assert is_same(there.lerp(other, 0.3), a.lerp(b, 0.3))
    assert is_same(0.25 * there + 0.75 * other, 0.25 * a + 0.75 * b)
    assert is_same(torch.mul(there, 0.9, out=torch.empty_like(there)), a * 0.9)
    copy = there.clone()
    copy.copy_(other).sub_(there, alpha=2.0)
    copy.mul_(0.5).add_(b)
    assert is_same(copy, b.clone().sub_(a, alpha=2.0).mul_(0.5).add_(b))
    assert is_same(there, a)
    number = torch.tensor(1.0)
    for refused in (lambda: there[3:5], lambda: there.sum(), lambda: there.sqrt(), lambda: number - there):
        try:
            refused()
        except NotImplementedError as error:
            assert "which lies in several processes" in str(error)  # noqa: PT017
        else:
            raise AssertionError("no plain arithmetic")


def check_bytes(site: Site) -> None:
    """Digests, payloads, results, errors of codecs and files are those of plain vectors."""
    a, b = drawn(1), drawn(2)
    there, kept = spread(site, a), spread(site, b)
    assert chunk_digests(there) == chunk_digests(a)
    assert replica_digest(there, {"momentum": kept}) == replica_digest(a, {"momentum": b})
    parts = cut(NUM, [3, 5, 0, 1])
    sparse: list[CodecConfig] = [TopKConfig(), RandomKConfig(kept=410, largest=82, values="int4")]
    for config in (Bf16Config(), Int8Config(), Int4Config(), *sparse):
        codec = build(config)
        encoded = encode_parts(codec, there, parts)
        assert [bytes(each) for each in encoded] == [bytes(each) for each in encode_parts(codec, a, parts)]
        decoded = decode_parts(codec, encoded, parts, torch.empty_like(there))
        assert is_same(decoded, decode_parts(codec, encoded, parts))
        found, left = encode_with_feedback(codec, there, parts, kept, 0.9)
        expected, error = encode_with_feedback(codec, a, parts, b, 0.9)
        assert [bytes(each) for each in found] == [bytes(each) for each in expected]
        assert is_same(left, error)
    folder = Path(sys.argv[4])
    assert write_vectors(folder / "spread", {"v": there}) == write_vectors(folder / "plain", {"v": a})
    assert (folder / "spread").read_bytes() == (folder / "plain").read_bytes()
    broken = there.clone()
    broken.write(range(NUM - 1, NUM), torch.tensor([float("nan")]))
    try:
        encode_parts(build(Int8Config()), broken, parts)
    except NotFinite:
        pass
    else:
        raise AssertionError("NaN was sent")


def check_outer_steps(site: Site) -> None:
    """Outer steps have the bits that they have on plain vectors, where they are clipped, too."""
    configs: list[OuterConfig] = [SgdConfig(), NesterovConfig(), DelayedNesterovConfig(delay=2), AdamWConfig()]
    for config in (*configs, InnerSgdConfig(momentum=0.9)):
        optimizer = optimizers.build(config)
        outer, state = drawn(3), optimizer.init(NUM)
        there = spread(site, outer)
        held = {name: alike(vector, there) for name, vector in state.items()}
        for number in (1, 2):
            merged = drawn(10 + number)
            context = StepContext(number=number, lr=1e-3, num_decayed=2 * CHUNK + 1, max_norm=5.0)
            there.step(config, held, spread(site, merged), context)
            optimizer.apply(outer, state, merged, context)
        assert is_same(there, outer), config
        assert all(is_same(held[name], vector) for name, vector in state.items()), config


def check_memory(site: Site) -> None:
    """What rank 0 has forgotten, nobody holds."""
    vectors = [spread(site, drawn(1)) for _ in range(3)]
    assert is_same(vectors[0] - vectors[1], torch.zeros(NUM))
    alias = vectors[2].detach()
    del vectors
    assert is_same(alias, drawn(1))  # tells the others what was dropped before
    assert len(site._worker._vectors) == 1


# --- training ---


def batches_of(run: RunConfig, split: str = "train") -> Batches:
    folder = Path(sys.argv[4]) / "shards"
    return rows_batches(run, folder, split) if run.data.has_rows else batches(folder, split)


class Both:
    """A site's learner, and a trainer of one process, on the same run."""

    def __init__(self, site: Site, run: RunConfig) -> None:
        self.events: list[Event] = []
        self.site = SiteLearner(site, run, 2, batches_of(run), self.events.append, VirtualClock())
        self.plain = Trainer(run, SETTINGS, batches_of(run), self.events.append, VirtualClock())
        self.heldout = batches_of(run, "heldout")
        vector = initial_vector(run.model, run.seed)
        self.outer = spread(site, vector)
        self.site.start(self.outer)
        self.plain.start(vector)

    def train(self, start: int, num: int) -> None:
        positions = np.arange(start, start + num, dtype=np.int64)
        here, there = self.plain.train(positions, 0, 1), self.site.train(positions, 0, 1)
        assert (here.num_steps, here.num_tokens) == (there.num_steps, there.num_tokens)
        np.testing.assert_allclose(there.mean_loss, here.mean_loss, rtol=1e-5)

    def compare(self) -> None:
        torch.testing.assert_close(gathered(self.site.local()), self.plain.local(), **CLOSE)
        found, expected = self.site.private_state(), self.plain.private_state()
        assert found.keys() == expected.keys()
        for name, vector in expected.items():
            if vector.is_floating_point():
                torch.testing.assert_close(torch.cat([piece(found[name], vector)]), vector, **CLOSE)
            else:
                assert torch.equal(found[name], vector)


def piece(held: Any, like: Tensor) -> Tensor:
    whole: Tensor = held.read(range(like.numel()))
    return whole


def check_training(site: Site) -> None:
    """A site trains as one process does, but for the order of sums."""
    for optimizer in (AdamWConfig(), InnerSgdConfig(momentum=0.9)):
        both = Both(site, run_config(batch_size=4, optimizer=optimizer, clip=0.7))
        both.train(0, 16)
        both.compare()
        both.site.park()
        both.plain.park()
        torch.testing.assert_close(gathered(both.site.local()), both.plain.local(), **CLOSE)
        both.site.unpark()
        both.plain.unpark()
        both.train(16, 8)
        both.compare()
        steps = [event for event in both.events if isinstance(event, StepDone)]
        assert len(steps) == 12


def check_gradients(site: Site) -> None:
    """Mean gradients are those of one process, and clipped where they are."""
    both = Both(site, run_config(batch_size=5))
    positions = np.arange(5, dtype=np.int64)
    expected, here = both.plain.gradient(positions, 0, 1)
    found, there = both.site.gradient(positions, 0, 1)
    torch.testing.assert_close(gathered(found), expected, **CLOSE)
    np.testing.assert_allclose(there.mean_loss, here.mean_loss, rtol=1e-5)


def check_rows(site: Site) -> None:
    """On rows of whole texts, mean gradients and held-out loss are those of one process."""
    run = rows_run(run_config(batch_size=5), Path(sys.argv[4]) / "shards")
    both, positions = Both(site, run), np.arange(5, dtype=np.int64)
    assert len({int((row != UNTRAINED).sum()) for row in batches_of(run).at(positions).targets}) > 1
    expected, here = both.plain.gradient(positions, 0, 1)
    found, there = both.site.gradient(positions, 0, 1)
    torch.testing.assert_close(gathered(found), expected, **CLOSE)
    np.testing.assert_allclose(there.mean_loss, here.mean_loss, rtol=1e-5)
    loss, num_tokens, *_ = both.site.evaluate(both.outer, both.heldout, 6)
    wanted = both.plain.evaluate(gathered(both.outer), both.heldout, 6)
    assert num_tokens == wanted[1]
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)


def check_pull(site: Site) -> None:
    """FedProx pulls a site as it pulls one process."""
    both = Both(site, run_config(FedAvgConfig(every=4, proximal=0.5)))
    both.train(0, 16)
    both.compare()


def check_restored(site: Site) -> None:
    """What one process has saved a site goes on with, and the other way round."""
    run, folder = run_config(), Path(sys.argv[4])
    both = Both(site, run)
    both.train(0, 8)
    saved = both.plain.private_state()
    vectors = {name: vector for name, vector in saved.items() if vector.is_floating_point()}
    index = write_vectors(folder / "private", {**vectors, "local": both.plain.local()})
    again = Both(site, run)
    loaded = dict(read_vectors(folder / "private", index))
    local = loaded.pop("local")
    again.site.set_local(local)
    again.site.load_private_state({**loaded, "num_steps": saved["num_steps"]})
    again.plain.set_local(local)
    again.plain.load_private_state({**loaded, "num_steps": saved["num_steps"]})
    again.compare()
    again.train(8, 8)
    again.compare()
    held = {name: vector for name, vector in again.site.private_state().items() if name != "num_steps"}
    back = dict(read_vectors(folder / "of-site", write_vectors(folder / "of-site", held)))
    for name, vector in back.items():
        torch.testing.assert_close(vector, again.plain.private_state()[name], **CLOSE)
    try:
        again.site.load_private_state({"num_steps": saved["num_steps"]})
    except CheckpointError:
        pass
    else:
        raise AssertionError("moments were missing")


def check_measured(site: Site) -> None:
    """Held-out loss and text are those of one process; what is trained stays as it was."""
    both = Both(site, run_config())
    both.train(0, 8)
    before = gathered(both.site.local())
    plain = gathered(both.outer)
    (found, num_tokens, *_), expected = both.site.evaluate(both.outer, both.heldout, 6), None
    expected = both.plain.evaluate(plain, both.heldout, 6)
    assert num_tokens == expected[1]
    np.testing.assert_allclose(found, expected[0], rtol=1e-5)
    text = both.site.sample(both.outer, ByteTokenizer(), "abc", 12, 1)
    assert text == both.plain.sample(plain, ByteTokenizer(), "abc", 12, 1)
    assert both.site.sample(both.outer, ByteTokenizer(), "abc", 12, 1, within_s=0.0) == ""
    assert both.site.sample(both.outer, ByteTokenizer(), "abc", 10**9, 1, within_s=0.5)  # not for days
    assert is_same(both.site.local(), before)
    both.train(8, 8)
    both.compare()


def check_half(site: Site) -> None:
    """In bf16, and with blocks computed again, a site finds the loss of one process in fp32, up to rounding."""
    both = Both(site, run_config(batch_size=4))
    positions = np.arange(16, dtype=np.int64)
    here, there = both.plain.train(positions, 0, 1), both.site.train(positions, 0, 1)
    np.testing.assert_allclose(there.mean_loss, here.mean_loss, rtol=5e-3)
    assert there.mean_loss != here.mean_loss
    found, expected = (
        both.site.evaluate(both.outer, both.heldout, 6),
        both.plain.evaluate(gathered(both.outer), both.heldout, 6),
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=5e-3)
    assert len(both.site.sample(both.outer, ByteTokenizer(), "abc", 4, 1)) > 0


CHECKS: dict[str, list[Callable[[Site], None]]] = {
    "vectors": [check_arithmetic, check_bytes, check_outer_steps, check_memory],
    "training": [check_training, check_gradients, check_rows, check_pull, check_restored, check_measured],
    "half": [check_half],
}
HALF = replace(SETTINGS, precision="bf16", has_recompute=True)


def compare(line: Line, rank: int) -> None:
    """One rank has another precision than the first: all say so, and nobody waits for the others."""
    try:
        require_alike(line, replace(SETTINGS, precision="bf16" if rank == 1 else "fp32"))
    except ConfigError as error:
        print(error)  # noqa: T201


def main() -> None:
    torch.set_num_threads(1)
    for kind in sys.argv[1].split(","):
        one_site(kind, int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))


def one_site(kind: str, rank: int, num_ranks: int, folder: Path) -> None:
    line = Line("gloo", rank, num_ranks, f"file://{folder / f'meet-{kind}'}")
    if kind == "alike":
        compare(line, rank)
        return
    settings = HALF if kind == "half" else SETTINGS
    if rank:
        serve(line, settings)
        return
    num = NUM if kind == "vectors" else initial_vector(run_config().model, 0).numel()
    site = Site(line, settings)
    site.open(num, folder)
    for check in CHECKS[kind]:
        check(site)
        print(f"{kind}: {check.__doc__}")  # noqa: T201
    site.close()


if __name__ == "__main__":
    main()
