"""`weft compose reshard | reroute`, and a path that is kept as it was best: against plain programs."""

import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from unit.cli.compose.made import CONFIG, WORDS, served, write
from unit.cli.small import Weft
from unit.compose.experts.texts import documents
from unit.compose.paths.test_resharding import newton
from weft.cli.model.trained import Trained, open_trained
from weft.cli.serve.loading import How
from weft.compose.paths.folder import (
    FOR_ROUTER,
    MODULES,
    SEED,
    TRAINED,
    SharedPaths,
    begun_vector,
    last_modules,
    path_called,
    read_rerouter,
    read_shared,
    shard_of,
    write_trained,
)
from weft.compose.paths.levels import Path as ModulePath
from weft.compose.paths.modules import Modules
from weft.compose.paths.play import InnerStepsConfig, Steps
from weft.compose.paths.routing import RoutingConfig
from weft.compose.space import numbers_digest
from weft.engine.draw import Drawing
from weft.engine.text import Wanted
from weft.errors import ConfigError
from weft.library import sync
from weft.model.flat import assemble, layout
from weft.model.weights import read_folder
from weft.sync.method.schedule import CosineConfig

SEQ_LEN, STEPS, ROUNDS = 48, 2, 3
L2 = 1e-3
HOW = How(device="cpu", cache="1MB", numbers="fp32")  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return documents of which some are shorter than a sample."""
    lines = [
        json.dumps({"text": each.text if number % 3 else each.text[: 2 + number]})
        for number, each in enumerate(documents(40))
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path / "text.jsonl"


def route(weft: Weft, home: Path, text: Path, *options: str, share: float = 0.3) -> Path:
    write(home, "seed", 1, num_layers=2)
    folder = text.parent / "talk"
    line = ("--data", text, "--levels", "2,2", "--seq-len", SEQ_LEN, "--rounds", ROUNDS, "--steps", STEPS)
    answer = weft("compose", "route", "seed", folder, *line, "--router-share", share, "--heldout", 0.2, *options)
    assert answer.code == 0, answer.err
    return folder


def train(folder: Path) -> Modules:
    """Put trained paths into a folder, whose modules have come apart; a path is best as something else."""
    shared, _ = read_shared(folder)
    _, seed = read_folder(folder / SEED)
    generator = torch.Generator().manual_seed(1)
    vectors = Modules.of(shared.cut, seed).vectors
    modules = Modules(
        shared.cut,
        {at: each + each.std() * torch.randn(each.shape, generator=generator) for at, each in vectors.items()},
    )
    for number, path in enumerate(shared.cut.paths):
        best = Trained(folder, shared.model, modules.vector(path) * (1 + 0.1 * number), WORDS, None)
        parts = modules.parts(path, modules.vector(path))
        write_trained(folder / TRAINED / path_called(path), shared, path, parts, best.export)
    return modules


@pytest.fixture
def folder(weft: Weft, home: Path, text: Path) -> Path:
    return route(weft, home, text)


def lines(file: Path) -> list[tuple[str, str]]:
    return [(each["name"], each["text"]) for each in map(json.loads, file.read_text().splitlines())]


def shard(folder: Path, path: ModulePath, side: str = "train") -> list[tuple[str, str]]:
    return lines(folder / shard_of(path, is_heldout=side == "heldout"))


# --- slow and plain: 2403.10616, section 2.4 ---


def token_losses_of(config: Any, vector: Tensor, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    words = torch.from_numpy(ids.astype(np.int64))
    likely = assemble(config, vector)(words[None, :-1])[0].double().log_softmax(-1)
    return np.array([-float(likely[at, word]) for at, word in enumerate(words[1:])])


def feature_of(seed: Tensor, config: Any, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    x = assemble(config, seed).features(torch.from_numpy(ids.astype(np.int64))[None], None)
    return x[0].double().mean(0).numpy()


def regression(z: NDArray[np.float64], best: NDArray[np.int64], num: int) -> tuple[Any, Any]:
    """Return weights and biases of softmax regression on z brought to mean 0 and deviation 1, for z as it is."""
    mean, std = z.mean(0), z.std(0)
    weights, biases = newton((z - mean) / std, best, num, L2)
    return weights / std, biases - (weights / std) @ mean


def dealt(scores: NDArray[np.float64], least: int) -> list[set[int]]:
    """Return the documents of each path: the best, and then what a path is given that has too few."""
    chosen = scores.argmax(1)
    for path in range(scores.shape[1]):
        while (chosen == path).sum() < least:
            others = [at for at, mine in enumerate(chosen) if mine != path and (chosen == mine).sum() > least]
            if not others:
                break
            chosen[min(others, key=lambda at: scores[at, chosen[at]] - scores[at, path])] = path
    return [set(np.flatnonzero(chosen == path).tolist()) for path in range(scores.shape[1])]


def test_documents_go_to_the_paths_that_are_best_at_them(weft: Weft, folder: Path, tmp_path: Path) -> None:
    modules, (shared, before), (_, seed) = train(folder), read_shared(folder), read_folder(folder / SEED)
    answer = weft("compose", "reshard", folder, tmp_path / "talk2")
    assert answer.code == 0, answer.err
    paths, config = shared.cut.paths, shared.model

    texts = [text for _, text in lines(folder / FOR_ROUTER)]
    ids = [WORDS.encode(text)[: SEQ_LEN + 1] for text in texts]
    assert min(map(len, ids)) < 32 < max(map(len, ids)) == SEQ_LEN + 1
    vectors = [modules.vector(path) for path in paths]
    losses = np.array([[token_losses_of(config, vector, each).mean() for vector in vectors] for each in ids])
    z = np.stack([feature_of(seed, config, each[:32]) for each in ids])
    weights, biases = regression(z, losses.argmin(1), len(paths))
    again, router = read_shared(tmp_path / "talk2")
    assert router.record.kind == "softmax"
    np.testing.assert_allclose(router.weights, weights, rtol=1e-2, atol=1e-2)

    for side in ("train", "heldout"):
        given = [each for path in paths for each in shard(folder, path, side)]
        features = np.stack([feature_of(seed, config, WORDS.encode(text)[:32]) for _, text in given])
        least = int(RoutingConfig().least * len(given) / len(paths))
        expected = dealt(features @ weights.T + biases, least if side == "train" else max(1, least))
        for path, mine in zip(paths, expected, strict=True):
            assert {given[number] for number in mine} == set(shard(tmp_path / "talk2", path, side)), (path, side)
    assert again.documents == tuple(len(shard(tmp_path / "talk2", path)) for path in paths)
    assert lines(folder / FOR_ROUTER) == lines(tmp_path / "talk2" / FOR_ROUTER)
    moved = sum(len(set(shard(tmp_path / "talk2", path)) - set(shard(folder, path))) for path in paths)
    assert moved
    assert f"{moved} of {sum(again.documents)} documents go to another path" in answer.err
    assert f"learnt from {len(ids)} documents" in answer.err
    assert f"{losses.min(1).mean():.4f} along the best for each" in " ".join(answer.err.split())
    assert router.digest != before.digest


def test_the_next_phase_begins_with_the_modules_and_not_with_what_paths_were_best_as(
    weft: Weft, folder: Path, home: Path, tmp_path: Path
) -> None:
    modules = train(folder)
    for name, options, rounds in (("talk2", (), ROUNDS), ("talk3", ("--rounds", 7), 7)):
        assert weft("compose", "reshard", folder, tmp_path / name, *options).code == 0
        shared, _ = read_shared(tmp_path / name)
        assert (shared.name, shared.rounds, shared.rounds_before, shared.more_rounds) == (name, rounds, ROUNDS, 0)
    first, _ = read_shared(folder)
    assert shared.flops == first.flops // ROUNDS * (ROUNDS + 7)
    seed = open_trained(str(tmp_path / "talk3" / SEED), home).vector
    for path in shared.cut.paths:
        assert torch.equal(begun_vector(tmp_path / "talk3", shared, path, seed), modules.vector(path))
        assert torch.equal(begun_vector(folder, first, path, seed), seed)
    with pytest.raises(ConfigError, match="another model than the paths begin as"):
        begun_vector(tmp_path / "talk3", shared, (0, 0), 2 * seed)
    shutil.copy(tmp_path / "talk3" / MODULES / "0.0.safetensors", tmp_path / "talk3" / MODULES / "0.1.safetensors")
    with pytest.raises(ConfigError, match=r"0\.1\.safetensors: another module than paths\.json names"):
        begun_vector(tmp_path / "talk3", shared, (1, 0), seed)


def test_rounds_that_were_left_are_those_of_the_next_phase(weft: Weft, home: Path, text: Path, tmp_path: Path) -> None:
    folder = route(weft, home, text, "--more-rounds", "7")
    train(folder)
    told = []
    for name, options in (("all", ()), ("some", ("--rounds", 5)), ("more", ("--rounds", 9))):
        assert weft("compose", "reshard", folder, tmp_path / name, *options).code == 0
        shared, _ = read_shared(tmp_path / name)
        told.append((shared.rounds_before, shared.rounds, shared.more_rounds))
    assert told == [(3, 7, 0), (3, 5, 2), (3, 9, 0)]


def test_where_shards_overlap_each_document_keeps_as_many_paths(
    weft: Weft, home: Path, text: Path, tmp_path: Path
) -> None:
    folder = route(weft, home, text, "--overlap", "2", "--how", "product", "--ends", "path")
    shared, router = read_shared(folder)
    assert (router.record.kind, shared.overlap, len(shared.cut.modules)) == ("product_k_means", 2, 4 + 4)
    assert shared.founder(shared.cut.modules[-1]) == (1, 1)  # each path's ends are a run of its own
    assert shared.run_of(shared.cut.modules[-1]).peers == 1
    train(folder)
    assert weft("compose", "reshard", folder, tmp_path / "talk2").code == 0
    counts = [
        Counter(each for path in shared.cut.paths for each in shard(at, path, side))
        for at in (folder, tmp_path / "talk2")
        for side in ("train", "heldout")
    ]
    assert all(set(each.values()) == {2} for each in counts)
    assert [set(each) for each in counts[:2]] == [set(each) for each in counts[2:]]


def test_what_cannot_be_dealt_anew_is_refused(weft: Weft, home: Path, folder: Path, tmp_path: Path) -> None:
    def said(*line: Any) -> str:
        answer = weft("compose", *line)
        assert answer.code == 2
        assert not (tmp_path / "to").exists()
        return " ".join(answer.err.split())

    assert "lacks 0.0, 0.1, 1.0, 1.1" in said("reshard", folder, tmp_path / "to")
    assert "lacks 0.0, 0.1, 1.0, 1.1" in said("reroute", folder, "--every", 20)
    assert "overwrites no folder" in said("reshard", folder, home)  # before anything is read
    train(folder)
    (tmp_path / "elsewhere").mkdir()
    assert "have runs of their own" in said("reshard", folder, tmp_path / "elsewhere" / "talk")
    assert "Choose at most 24" in said("reroute", folder, "--every", 25)
    (folder / TRAINED / "0.1" / MODULES / "1.1.safetensors").write_bytes(b"torn")
    assert "1.1.safetensors: cannot be read" in said("reshard", folder, tmp_path / "to")
    shutil.copy(
        folder / TRAINED / "0.0" / MODULES / "1.0.safetensors", folder / TRAINED / "0.1" / MODULES / "1.1.safetensors"
    )
    unlike = said("reshard", folder, tmp_path / "to")
    assert "0.1 and 1.1 have different modules 1.1" in unlike
    assert "give it the other's file modules/1.1.safetensors" in unlike
    (folder / FOR_ROUTER).write_bytes(b"")
    for verb in (("reroute", folder, "--every", 20), ("reshard", folder, tmp_path / "to")):
        shutil.rmtree(folder / TRAINED)
        train(folder)
        assert "with a --router-share above 0" in said(*verb)


def test_no_path_trains_on_what_routers_learn_from(weft: Weft, home: Path, text: Path) -> None:
    folder = route(weft, home, text)
    shared, _ = read_shared(folder)
    apart = set(lines(folder / FOR_ROUTER))
    trained = {each for path in shared.cut.paths for each in shard(folder, path)}
    held = {each for path in shared.cut.paths for each in shard(folder, path, "heldout")}
    assert len(apart) == round(0.3 * (len(apart) + len(trained)))
    assert not apart & (trained | held)
    assert len(apart | trained | held) == len(documents(40))
    assert all(shard(folder, path, "heldout") for path in shared.cut.paths)  # each can be measured
    shutil.rmtree(folder)
    shutil.rmtree(home / "members")
    folder = route(weft, home, text, share=0)
    assert (folder / FOR_ROUTER).read_bytes() == b""


# --- routers of later pieces ---

EVERY = 12


def test_a_router_of_pieces_learns_which_path_is_best_at_the_next(weft: Weft, folder: Path) -> None:
    train(folder)
    answer = weft("compose", "reroute", folder, "--every", EVERY)
    assert answer.code == 0, answer.err
    (shared, _), (config, seed) = read_shared(folder), read_folder(folder / SEED)
    ids = [WORDS.encode(text)[: SEQ_LEN + 1] for _, text in lines(folder / FOR_ROUTER)]
    z, losses = [], []
    best = [read_folder(folder / TRAINED / path_called(path))[1] for path in shared.cut.paths]  # as texts are read
    for each in ids:
        of_each = [token_losses_of(config, vector, each) for vector in best]
        for start in range(EVERY, len(each), EVERY):
            if start + EVERY <= len(each):
                z.append(feature_of(seed, config, each[start - EVERY : start]))
                losses.append([mine[start - 1 : start - 1 + EVERY].mean() for mine in of_each])
    weights, _ = regression(np.array(z), np.array(losses).argmin(1), 4)
    router = read_rerouter(folder, shared, EVERY)
    assert router is not None
    np.testing.assert_allclose(router.weights, weights, rtol=1e-2, atol=1e-2)
    assert (router.record.prefix, router.record.kind) == (EVERY, "softmax")
    assert f"learnt from {len(z)} pieces" in answer.err
    assert read_rerouter(folder, shared, EVERY + 1) is None
    shutil.copy(folder / f"rerouter-{EVERY}.bin", folder / f"rerouter-{EVERY + 1}.bin")
    with pytest.raises(ConfigError, match=r"pieces of 12 tokens\. Make it again"):
        read_rerouter(folder, shared, EVERY + 1)
    (folder / f"rerouter-{EVERY}.bin").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rerouter(folder, shared, EVERY)


def fingerprint(folder: Path, home: Path) -> str:
    """Return what names paths that are served and routed again."""
    found = served(folder, "", HOW, home, EVERY)
    found.engine.close()
    return found.fingerprint


async def test_texts_that_are_routed_again_go_by_it_where_it_is_there(
    weft: Weft, folder: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder)
    (tmp_path / "other.txt").write_text("".join(each.text for each in documents(30)[24:])[:2000])
    given = ("compose", "evaluate", folder, "--data", tmp_path / "other.txt", "--no-monolith", "--route-every", EVERY)
    before, said = json.loads(weft(*given, "--json").out), weft(*given).out
    assert "go by the router of first tokens" in said
    assert f"weft compose reroute {folder} --every {EVERY}" in said
    print_before = fingerprint(folder, home)
    assert weft("compose", "reroute", folder, "--every", EVERY).code == 0
    assert fingerprint(folder, home) != print_before
    after, said = json.loads(weft(*given, "--json").out), weft(*given).out
    assert f"go by rerouter-{EVERY}.bin, which is their own" in said
    assert (before["has_rerouter"], after["has_rerouter"]) == (False, True)
    assert before["loss"] != after["loss"]
    assert before["members"][0]["loss"] == after["members"][0]["loss"]

    shared, router = read_shared(folder)
    rerouter, (config, seed) = read_rerouter(folder, shared, EVERY), read_folder(folder / SEED)
    assert rerouter is not None
    engine: Any = served(folder, "", HOW, home, EVERY).engine
    num_unlike = 0
    try:
        assert f"go by rerouter-{EVERY}.bin" in " ".join(capsys.readouterr().err.split())
        for each in documents(6):
            ids = WORDS.encode(each.text[:EVERY])
            z = feature_of(seed, config, ids)[None]
            second = engine.path_of([int(token) for token in ids], EVERY)
            assert second == shared.cut.paths[int(rerouter.best(z)[0])]
            num_unlike += second != shared.cut.paths[int(router.best(z)[0])]
            first = engine.path_of([int(token) for token in ids[:-1]], EVERY)
            short = feature_of(seed, config, ids[:-1])[None]
            assert first == shared.cut.paths[int(router.best(short)[0])]
        assert num_unlike
        text = engine.begin(Wanted("key", tuple(int(token) for token in ids), 3, Drawing(temperature=0.0)))
        assert len([token async for token in text]) == 3
    finally:
        engine.close()


# --- early stopping ---


class AlonePeer:
    """A run of a module with one peer. At the end of a round the module moves by chance, at last ever further.

    Args:
        tensors: of the module.
    """

    ends: ClassVar[dict[int, list[dict[str, Tensor]]]] = {}  # of a round: of each module, what it ended as

    def __init__(self, tensors: dict[str, Tensor], run: Any, **_: Any) -> None:
        self.tensors, self.run = tensors, run
        self.num_steps = 0
        self.outcome: Any = None
        self.generator = torch.Generator().manual_seed(len(tensors))

    @property
    def round(self) -> int:
        return self.num_steps // STEPS

    @property
    def progress(self) -> float:
        return self.round / ROUNDS

    def start(self) -> None:
        AlonePeer.ends.setdefault(0, []).append(self._now())

    def step(self, weight: int, loss: float) -> bool:
        self.num_steps += 1
        if self.num_steps % STEPS:
            return True
        for each in self.tensors.values():
            each.add_(each.std() * 0.2 * (self.round - 1) ** 2 * torch.randn(each.shape, generator=self.generator))
        AlonePeer.ends.setdefault(self.round, []).append(self._now())
        if self.round < ROUNDS:
            return True
        self.outcome = SimpleNamespace(reason="complete")
        return False

    def close(self, error: BaseException | None = None) -> None:
        raise AssertionError(error)

    def _now(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.tensors.items()}


@pytest.fixture
def one_path(weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of one path."""
    monkeypatch.setattr(sync, "Sync", AlonePeer)
    monkeypatch.setattr(AlonePeer, "ends", {})
    return route(weft, home, text, "--levels", "1", "--lr", "1e-2")


def in_round(folder: Path, number: int) -> Tensor:
    """Return the path's vector after a round."""
    config, seed = read_folder(folder / SEED)
    named, whole = {name: each for module in AlonePeer.ends[number] for name, each in module.items()}, seed.clone()
    for span in layout(config):
        whole[span.offset : span.stop] = named[span.name].flatten()
    return whole


def heldout_loss(folder: Path, vector: Tensor) -> float:
    ids = [WORDS.encode(text)[: SEQ_LEN + 1] for _, text in shard(folder, (0,), "heldout")]
    return float(np.concatenate([token_losses_of(read_folder(folder / SEED)[0], vector, each) for each in ids]).mean())


def test_a_path_is_written_as_it_was_best_on_its_held_out_documents(weft: Weft, one_path: Path) -> None:
    answer = weft("compose", "path", one_path, "0", "--device", "cpu")
    assert answer.code == 0, answer.err
    losses = [heldout_loss(one_path, in_round(one_path, number)) for number in range(ROUNDS + 1)]
    best = int(np.argmin(losses))
    assert 0 < best < ROUNDS, losses  # neither the first nor the last
    _, written = read_folder(one_path / TRAINED / "0")
    assert torch.equal(written, in_round(one_path, best))
    shared, _ = read_shared(one_path)
    last = Modules.of(shared.cut, in_round(one_path, ROUNDS))
    for module, vector in last_modules(one_path, shared).vectors.items():
        assert torch.equal(vector, last.vectors[module])
    said = " ".join(answer.err.split())
    for number, loss in enumerate(losses):
        assert f"after round {number}: held out {loss:.4f} nats a token" in said
    assert (
        f"after round {ROUNDS}: held out {losses[-1]:.4f} nats a token; it was {losses[best]:.4f} after round {best}"
        in said
    )
    assert f"written as it was after round {best}: held out {losses[best]:.4f}" in said
    assert f"the path lies in {one_path / TRAINED / '0'}" in said
    assert not answer.out  # of lines that are printed a file of tickets is made


def test_a_path_may_be_written_as_it_is_at_the_end(weft: Weft, one_path: Path) -> None:
    answer = weft("compose", "path", one_path, "0", "--device", "cpu", "--keep", "last")
    assert answer.code == 0, answer.err
    assert torch.equal(read_folder(one_path / TRAINED / "0")[1], in_round(one_path, ROUNDS))
    assert "held out" not in answer.err


def test_a_path_of_which_nothing_is_held_out_is_written_as_it_is_at_the_end(weft: Weft, one_path: Path) -> None:
    (one_path / shard_of((0,), is_heldout=True)).write_bytes(b"")
    answer = weft("compose", "path", one_path, "0", "--device", "cpu")
    assert answer.code == 0, answer.err
    assert torch.equal(read_folder(one_path / TRAINED / "0")[1], in_round(one_path, ROUNDS))
    assert "nothing is held out for this path: it is written as it is at the end" in answer.err


def test_the_rate_of_a_phase_goes_on_where_the_one_before_ended(
    weft: Weft, one_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, schedules = list[int](), list[CosineConfig]()
    make, begin = Steps.make, Steps.__init__

    def noted_begin(self: Steps, config: InnerStepsConfig, model: Any) -> None:
        assert isinstance(config.schedule, CosineConfig)
        schedules.append(config.schedule)
        begin(self, config, model)

    def noted(self: Steps, windows: Any, num: int, draw: Any, first: int = 0) -> float:
        numbers.append(first)
        return make(self, windows, num, draw, first)

    monkeypatch.setattr(Steps, "__init__", noted_begin)
    monkeypatch.setattr(Steps, "make", noted)
    shared: SharedPaths
    assert weft("compose", "path", one_path, "0", "--device", "cpu").code == 0
    answer = weft("compose", "reshard", one_path, tmp_path / "talk2", "--rounds", ROUNDS)
    assert answer.code == 0, answer.err
    before = in_round(one_path, ROUNDS)
    AlonePeer.ends.clear()
    assert weft("compose", "path", tmp_path / "talk2", "0", "--device", "cpu").code == 0
    assert torch.equal(in_round(tmp_path / "talk2", 0), before)
    assert numbers == [*range(2 * ROUNDS * STEPS)]
    shared, _ = read_shared(tmp_path / "talk2")
    a_round = STEPS * shared.batch_size * SEQ_LEN
    assert [each.total_tokens for each in schedules] == [ROUNDS * a_round, 2 * ROUNDS * a_round]
    assert numbers_digest(before) != shared.seed_model
    assert CONFIG.width == shared.model.width


class Behind(AlonePeer):
    """The second run's rounds count three quarters, as where another path of the module is away, and it makes four."""

    made: ClassVar[list["Behind"]] = []

    def __init__(self, tensors: dict[str, Tensor], run: Any, **how: Any) -> None:
        super().__init__(tensors, run, **how)
        self.num_rounds, self.at_the_end = ROUNDS + len(self.made), self._now()
        self.made.append(self)

    @property
    def progress(self) -> float:
        return self.round / self.num_rounds

    def step(self, weight: int, loss: float) -> bool:
        self.num_steps += 1
        if self.round < self.num_rounds:
            return True
        self.outcome, self.at_the_end = SimpleNamespace(reason="complete"), self._now()
        return False


def test_the_rate_falls_with_the_module_that_is_last(
    weft: Weft, one_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, make = list[int](), Steps.make

    def noted(self: Steps, windows: Any, num: int, draw: Any, first: int = 0) -> float:
        numbers.append(first)
        return make(self, windows, num, draw, first)

    monkeypatch.setattr(Steps, "make", noted)
    monkeypatch.setattr(sync, "Sync", Behind)
    monkeypatch.setattr(Behind, "made", [])
    answer = weft("compose", "path", one_path, "0", "--device", "cpu")
    assert answer.code == 0, answer.err
    assert (ROUNDS, STEPS, [each.num_rounds for each in Behind.made]) == (3, 2, [3, 4])
    assert numbers == [0, 1, 2, 3, 3, 4, 4, 5]  # of 6, from 0, 1.5, 3 and 4.5 on
    for each in Behind.made:  # what the last one's steps do changes nothing in the first
        assert all(torch.equal(each.at_the_end[name], tensor) for name, tensor in each.tensors.items())


# --- runs that cannot begin, or have ended ---


class Waiting(AlonePeer):
    """A run whose peers do not come, until it is closed; the second cannot begin at all."""

    made: ClassVar[list["Waiting"]] = []

    def __init__(self, tensors: dict[str, Tensor], run: Any, **how: Any) -> None:
        super().__init__(tensors, run, **how)
        self.number, self.is_closed = len(self.made), threading.Event()
        self.made.append(self)

    def start(self) -> None:
        if self.number == 1:
            raise ConfigError("the ticket is old")
        assert self.is_closed.wait(20), "whoever waits is not told that it is over"

    def close(self, error: BaseException | None = None) -> None:
        assert isinstance(error, ConfigError)
        self.is_closed.set()


def test_a_run_that_cannot_begin_is_told_while_others_wait_for_peers(
    weft: Weft, one_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "Sync", Waiting)
    monkeypatch.setattr(Waiting, "made", [])
    answer = weft("compose", "path", one_path, "0", "--device", "cpu")
    assert (answer.code, len(Waiting.made)) == (2, 2)
    assert "the ticket is old" in answer.err
    assert all(each.is_closed.is_set() for each in Waiting.made)


def test_a_path_that_could_not_be_written_is_not_trained(
    weft: Weft, one_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "Sync", None)
    (one_path / TRAINED).write_bytes(b"")
    answer = weft("compose", "path", one_path, "0", "--device", "cpu")
    assert answer.code == 2
    assert "trained: cannot be written" in answer.err


class Complete(AlonePeer):
    """A run that was complete when it was started again."""

    def start(self) -> None:
        self.num_steps = ROUNDS * STEPS

    def step(self, weight: int, loss: float) -> bool:
        self.outcome = SimpleNamespace(reason="complete")
        return False


def test_a_path_whose_runs_are_complete_is_measured_once(
    weft: Weft, one_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "Sync", Complete)
    answer = weft("compose", "path", one_path, "0", "--device", "cpu")
    assert answer.code == 0, answer.err
    assert answer.err.count(f"after round {ROUNDS}: held out") == 1
    assert "written as it was at the end" in answer.err
