"""`weft compose route | path`: what is written, what is refused, and what serves the paths."""

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from unit.cli.compose.made import FLOPS, WORDS, served, write
from unit.cli.small import RUN, Weft, as_trained, saved
from unit.compose.experts.texts import documents
from weft.cli.model.trained import open_trained
from weft.cli.serve.composed import composed_at
from weft.cli.serve.loading import How
from weft.compose.member import read_member
from weft.compose.paths.features import features
from weft.compose.paths.folder import (
    FOR_ROUTER,
    SEED,
    TRAINED,
    called,
    note_trained,
    path_called,
    path_of,
    read_shared,
    shard_of,
)
from weft.compose.paths.levels import Module
from weft.compose.paths.reading import Reader
from weft.compose.paths.serving import Paths
from weft.cost.training import flops_per_token
from weft.engine.draw import Drawing
from weft.engine.engine import Serves
from weft.engine.text import Wanted
from weft.errors import ConfigError
from weft.inference.sample import Sampling
from weft.training.device import decoder
from weft.wire import digest_of


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = [json.dumps({"name": each.name, "text": each.text}) for each in documents(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path / "text.jsonl"


@pytest.fixture
def folder(weft: Weft, home: Path, text: Path, tmp_path: Path) -> Path:
    write(home, "seed", 1)
    line = ("compose", "route", "seed", tmp_path / "talk", "--data", text, "--levels", "2", "--seq-len", "48")
    answer = weft(*line, "--rounds", "3", "--steps", "2")
    assert answer.code == 0, answer.err
    assert "path 0: " in answer.err
    return tmp_path / "talk"


def test_each_document_goes_the_path_that_the_router_says(folder: Path, home: Path, text: Path) -> None:
    shared, router = read_shared(folder)
    assert (shared.name, shared.steps, shared.rounds, shared.seq_len) == ("talk", 2, 3, 48)
    there = open_trained(str(folder / SEED), home)
    number, all_names = 0, list[str]()
    for number, way in enumerate(shared.cut.paths):
        train, held = (
            [json.loads(line) for line in (folder / shard_of(way, is_heldout=side)).read_text().splitlines()]
            for side in (False, True)
        )
        assert len(train) == shared.documents[number]
        z = features(there.on("cpu"), [WORDS.encode(each["text"])[:32] for each in [*train, *held]])
        near = (router.best(z) == number).mean()
        assert near > 0.7  # but for those that a path with too few was given
        all_names += [each["name"] for each in [*train, *held]]
    all_names += [json.loads(line)["name"] for line in (folder / FOR_ROUTER).read_text().splitlines()]
    assert len(set(all_names)) == len(all_names) == len(documents(40))


def test_runs_of_modules_follow_from_the_folder(folder: Path) -> None:
    shared, _ = read_shared(folder)
    modules = shared.cut.modules
    assert [called(module) for module in modules] == ["0.0", "0.1", "1.0"]  # the ends last
    ends = shared.run_of(Module(1, 0))
    assert (ends.peers, ends.name) == (2, f"talk-{digest_of(shared)[:8]}-1.0")
    method = ends.method
    assert method.lr == pytest.approx(0.7 * 2**0.5)  # type: ignore[union-attr]
    weights = [shared.weight(way) for way in shared.cut.paths]
    assert max(weights) == 1000
    assert ends.samples == 3 * 2 * sum(weights)
    assert shared.founder(Module(1, 0)) == (0,)
    alone = shared.run_of(Module(0, 1))
    assert (alone.peers, alone.method.lr) == (1, pytest.approx(0.7))  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="is no path"):
        path_of("0.1", shared.cut)


def test_another_folder_of_the_same_name_has_other_runs(folder: Path, weft: Weft, text: Path, tmp_path: Path) -> None:
    """Of a loop with the same config a home goes on with what it has, whatever parameters it is begun with."""

    def names(folder: Path) -> list[str]:
        shared, _ = read_shared(folder)
        return [shared.run_of(module).name for module in shared.cut.modules]

    line = ("--data", text, "--levels", "2", "--seq-len", "48", "--rounds", "3", "--steps", "2")
    write(tmp_path / "home", "other", 2)
    for at, (model, *options) in enumerate((("seed",), ("other",), ("seed", "--lr", "1e-5"))):
        answer = weft("compose", "route", model, tmp_path / str(at) / "talk", *line, *options)
        assert answer.code == 0, answer.err
    shutil.copytree(folder, tmp_path / "copy")
    assert names(folder) == names(tmp_path / "copy") == names(tmp_path / "0" / "talk")
    for at in ("1", "2"):
        assert not set(names(folder)) & set(names(tmp_path / at / "talk"))


def test_a_path_that_would_begin_a_module_of_others_is_refused(weft: Weft, folder: Path, tmp_path: Path) -> None:
    answer = weft("compose", "path", folder, "1")
    assert answer.code == 2
    assert "module 1.0 is begun by path 0" in answer.err
    (tmp_path / "tickets").write_text("1.0 nothing\n")
    assert "is no module and its ticket" in weft("compose", "path", folder, "1", "--tickets", tmp_path / "tickets").err
    write(tmp_path / "home", "other", 2)
    shutil.move(folder / "seed", folder / "before")
    shutil.copytree(tmp_path / "home" / "members" / "other", folder / "seed")
    assert "another model than the paths begin as" in weft("compose", "path", folder, "0").err
    (folder / TRAINED / "0").mkdir(parents=True)
    assert "the path is trained" in weft("compose", "path", folder, "0").err


def test_a_folder_that_was_altered_is_refused(folder: Path) -> None:
    record = json.loads((folder / "paths.json").read_text())
    (folder / "paths.json").write_text(json.dumps(record | {"router": "ab" * 32}))
    with pytest.raises(ConfigError, match="another router"):
        read_shared(folder)
    (folder / "router.bin").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shared(folder)
    (folder / "paths.json").unlink()
    with pytest.raises(ConfigError, match="weft compose route"):
        read_shared(folder)


@pytest.fixture
def trained(folder: Path, home: Path) -> Path:
    for number, name in enumerate(("0", "1")):
        assert write(home, f"trained-{name}", 20 + number).model.num_layers == 1
        shutil.copytree(home / "members" / f"trained-{name}", folder / TRAINED / name)
        note_trained(folder / TRAINED / name, read_shared(folder)[0], (number,))
    return folder


HOW = How(device="cpu", cache="1MB", numbers="fp32")  # type: ignore[arg-type]


def test_paths_that_are_not_all_trained_are_not_served(folder: Path, home: Path) -> None:
    with pytest.raises(ConfigError, match="lacks 0, 1"):
        served(folder, "", HOW, home)


def test_a_path_of_another_folder_or_another_path_is_not_taken(trained: Path, home: Path) -> None:
    (trained / TRAINED / "0").rename(trained / "kept")
    shutil.copytree(trained / TRAINED / "1", trained / TRAINED / "0")
    with pytest.raises(ConfigError, match="was not trained as path 0 of"):
        served(trained, "", HOW, home, 0)
    shutil.rmtree(trained / TRAINED / "0")
    (trained / "kept").rename(trained / TRAINED / "0")
    shared, _ = read_shared(trained)
    note_trained(trained / TRAINED / "1", replace(shared, rounds_before=5), (1,))
    with pytest.raises(ConfigError, match=r"path 1 of .* or not in this phase"):
        served(trained, "", HOW, home, 0)


async def test_each_text_is_drawn_by_its_path(trained: Path, home: Path) -> None:
    folder = trained
    assert composed_at(str(folder), home) == folder
    loaded = served(folder, "", HOW, home)
    engine = loaded.engine
    assert isinstance(engine, Paths)
    (turns,) = {each._turns for each in engine._engines.values()}
    assert turns._within is not None, "beside other models all paths are one"
    shared, router = read_shared(folder)
    seed = open_trained(str(folder / SEED), home).on("cpu")
    try:
        chosen = set()
        for each in documents(6):
            prompt = [int(token) for token in WORDS.encode(each.text[:40])]
            number = int(router.best(features(seed, [np.array(prompt[:32])]))[0])
            assert engine.path_of(prompt, None) == shared.cut.paths[number]
            chosen.add(number)
            text = engine.begin(Wanted("key", tuple(prompt), 3, Drawing(temperature=0.0)))
            drawn = [token.token async for token in text]
            tokens = list(prompt)
            model = open_trained(str(folder / TRAINED / str(number)), home).on("cpu")
            for token in drawn:
                assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
                tokens.append(token)
        assert chosen == {0, 1}
        assert engine.totals.num_drawn == 3 * len(documents(6))
    finally:
        engine.close()


EVERY = 8


async def drawn_by(engine: Serves, wanted: Wanted) -> list[int]:
    text = engine.begin(wanted)
    tokens = [token.token async for token in text]
    assert text.ended == "length"
    return tokens


async def test_a_text_that_is_routed_again_is_that_of_the_reader(trained: Path, home: Path) -> None:
    engine = served(trained, "", HOW, home, EVERY).engine
    shared, router = read_shared(trained)
    seed = open_trained(str(trained / SEED), home)
    models = {way: open_trained(str(trained / TRAINED / path_called(way)), home).on("cpu") for way in shared.cut.paths}
    reader = Reader(shared.cut, models.__getitem__, seed.vector, router, EVERY)
    num_changed = 0
    try:
        for number, each in enumerate(documents(6)):
            prompt = [int(token) for token in WORDS.encode(each.text[: 20 + number])]
            greedy = Sampling(temperature=0.0, max_new_tokens=24)
            expected = list(reader.write(prompt, greedy, np.random.default_rng(1)))
            wanted = Wanted("key", tuple(prompt), 24, Drawing(temperature=0.0))
            assert await drawn_by(engine, wanted) == [token for token, _ in expected]
            num_changed += sum(one != other for (_, one), (_, other) in pairwise(expected))
        assert num_changed, "some of them change their path"
    finally:
        engine.close()


def test_paths_are_served_beside_a_model_that_has_none(
    trained: Path, weft: Weft, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.serve.serve.run_until_told", lambda *_: None)
    answer = weft("serve", "seed", trained, "--route-every", EVERY, "--port", 0, "--threads", 1, "--device", "cpu")
    assert answer.code == 0, answer.err
    assert f"pieces of {EVERY} tokens go by the router of first tokens" in answer.err
    served_ = [line.partition(":")[0] for line in answer.err.splitlines() if "conversation has at most" in line]
    assert served_ == ["seed", "talk"]


async def test_what_was_drawn_counts_on_whatever_path_goes_on(folder: Path, home: Path) -> None:
    """Penalties, seeds and forms: of paths that are one model a text is the same, however often it is routed."""
    for name in ("0", "1"):
        write(home, f"trained-{name}", 20)
        shutil.copytree(home / "members" / f"trained-{name}", folder / TRAINED / name)
        note_trained(folder / TRAINED / name, read_shared(folder)[0], (int(name),))
    prompt, texts = tuple(int(token) for token in WORDS.encode("who was it? ")), list[list[int]]()
    drawing = Drawing(temperature=0.8, seed=bytes(32), frequency=0.7, presence=0.2, repetition=1.2)
    for every in (None, EVERY):
        engine = served(folder, "", HOW, home, every).engine
        try:
            form = Alternately(WORDS.encode("abc"), engine.vocab_size)
            texts.append(await drawn_by(engine, Wanted("key", prompt, 40, drawing)))
            texts.append(await drawn_by(engine, Wanted("key", prompt, 40, drawing, constraint=form)))
        finally:
            engine.close()
    free, formed, routed, routed_formed = texts
    assert (len(free), len(formed)) == (40, 40)
    assert (routed, routed_formed) == (free, formed)
    assert formed != free


async def test_a_text_that_is_routed_again_ends_when_it_is_given_up(trained: Path, home: Path) -> None:
    engine = served(trained, "", HOW, home, EVERY).engine
    try:
        text = engine.begin(Wanted("key", (1, 2, 3), 200, Drawing(temperature=0.0)))
        tokens = [await anext(text) for _ in range(2 * EVERY)]
        text.cancel()
        tokens += [token async for token in text]
        assert text.ended == "cancelled"
        assert len(tokens) <= 3 * EVERY
        assert text.began_s is not None
    finally:
        engine.close()


class Alternately:
    """Allows some tokens, and none twice in a row."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens, self._vocab_size, self._last = tokens, vocab_size, -1

    def allowed(self) -> NDArray[np.bool_]:
        found = np.zeros(self._vocab_size, dtype=np.bool_)
        found[[each for each in self._tokens if each != self._last]] = True
        return found

    def take(self, token: int) -> None:
        self._last = token


def test_paths_are_told_beside_each_of_them_and_what_they_began_as(
    trained: Path, weft: Weft, home: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join(each.text for each in documents(30)[20:]))
    given = ("compose", "evaluate", trained, "--data", other)
    assert "--no-monolith" in weft(*given).err
    reports = {}
    for every in (None, EVERY):
        again = () if every is None else ("--route-every", every)
        report = json.loads(weft(*given, "--no-monolith", "--json", *again).out)
        assert set(report["controls"]) == {"best single", "ensemble", "seed", "monolith"}
        assert report["controls"]["monolith"] is None
        alone = {each["name"]: each["loss"] for each in report["members"]}
        assert report["controls"]["best single"]["loss"] == min(alone.values())
        assert min(alone.values()) - 1.0 < report["loss"] < max(alone.values()) + 1.0
        reports[every] = report
    assert reports[None]["read_again"] == 0
    assert reports[EVERY]["read_again"] > 0
    assert reports[EVERY]["loss"] != reports[None]["loss"]
    assert reports[EVERY]["members"] == [
        each | {key: other_one[key] for key in ("difference", "error", "it_is")}
        for each, other_one in zip(reports[None]["members"], reports[EVERY]["members"], strict=True)
    ]
    write(home, "large", 3)
    answer = weft(*given, "--monolith", "large", "--route-every", EVERY)
    assert answer.code == 0, answer.err
    said = answer.out
    assert "2 paths, routed every 8 tokens" in said
    assert "what all paths began as" in said
    assert "once more" in said
    for one in (SEED, f"{TRAINED}/0"):
        shutil.rmtree(home / "members" / "large")
        shutil.copytree(home / "members" / ("seed" if one == SEED else "trained-0"), home / "members" / "large")
        assert "is one of the paths" in weft(*given, "--monolith", "large").err
    assert "none is routed again" in weft(*given, "--no-monolith", "--route-every", 49).err
    with pytest.raises(ConfigError, match="none is routed again"):
        served(trained, "", HOW, home, 64)
    shutil.rmtree(trained / TRAINED / "1")
    assert "lacks 1" in weft(*given, "--no-monolith").err


def test_the_loss_of_paths_is_that_of_the_path_of_each_text(
    trained: Path, weft: Weft, home: Path, tmp_path: Path
) -> None:
    """By a hand that knows nothing of readers: each sample's first tokens, their features, that path's losses."""
    (tmp_path / "other.txt").write_text("".join(each.text for each in documents(30)[24:]))
    report = json.loads(
        weft("compose", "evaluate", trained, "--data", tmp_path / "other.txt", "--no-monolith", "--json").out
    )
    shared, router = read_shared(trained)
    words = np.array(WORDS.encode((tmp_path / "other.txt").read_text()), dtype=np.int64)
    num = (len(words) - 1) // shared.seq_len
    samples = [words[at * shared.seq_len : (at + 1) * shared.seq_len + 1] for at in range(num)]
    seed = open_trained(str(trained / SEED), home).on("cpu")
    models = [open_trained(str(trained / TRAINED / path_called(path)), home).on("cpu") for path in shared.cut.paths]
    losses, together = [], []
    for sample in samples:
        of_each = [model(torch.tensor(sample[None, :-1])).log_softmax(-1)[0] for model in models]
        likely = of_each[int(router.best(features(seed, [sample[:32]]))[0])]
        mean = torch.stack(of_each).exp().mean(0).log()
        losses += [-float(likely[at - 1, sample[at]]) for at in range(32, len(sample))]
        together += [-float(mean[at - 1, sample[at]]) for at in range(32, len(sample))]
    assert report["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert report["controls"]["ensemble"]["loss"] == pytest.approx(np.mean(together), rel=1e-5)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--levels", "0"), "a level of 0 modules"),
        (("--levels=-3",), "a level of -3 modules"),
        (("--levels", "1,1,1,1,1"), "a model of 1 layer"),
        (("--seq-len", "1"), "samples have 34 tokens or more"),
        (("--seq-len", "33"), "samples have 34 tokens or more"),
        (("--heldout", "1e-320"), "the share of documents"),
        (("--steps", "100001"), "steps is 100001"),
        (("--rounds", "1000001"), "rounds is 1000001"),
        (("--batch-size", "100001"), "batch_size is 100001"),
        (("--levels", "2000"), "peers is 2000"),
        (("--overlap", "3"), "there are 2 paths"),
        (("--more-rounds", "1000001"), "more_rounds is 1000001"),
    ],
)
def test_numbers_that_no_folder_of_paths_can_have_are_refused_before_anything_is_read(
    weft: Weft, home: Path, text: Path, tmp_path: Path, option: tuple[str, ...], words: str
) -> None:
    write(home, "seed", 1)
    levels = () if "--levels" in option[0] else ("--levels", "2")
    answer = weft("compose", "route", "seed", tmp_path / "talk", "--data", text, *levels, *option)
    assert answer.code == 2, answer.err
    assert words in answer.err
    assert not (tmp_path / "talk").exists()


def test_a_folder_of_paths_is_called_as_their_runs_can_be(weft: Weft, home: Path, text: Path, tmp_path: Path) -> None:
    write(home, "seed", 1)
    answer = weft("compose", "route", "seed", tmp_path / ("x" * 41), "--data", text, "--levels", "2")
    assert answer.code == 2
    assert "at most 40" in answer.err


def test_what_would_come_to_nothing_is_refused_before_anybody_trains(
    weft: Weft, home: Path, text: Path, tmp_path: Path, folder: Path
) -> None:
    def said(data: Path, to: str = "to") -> str:
        line = ("compose", "route", "seed", tmp_path / to, "--data", data, "--levels", "2", "--seq-len", "48")
        answer = weft(*line, "--router-share", "0", "--heldout", "0")
        assert answer.code == 2, answer.err
        assert not (tmp_path / "to").exists()
        return " ".join(answer.err.split())

    (tmp_path / "blank.txt").write_text(" \n")
    assert "documents are blank" in said(tmp_path / "blank.txt")
    (tmp_path / "short.jsonl").write_text("\n".join(json.dumps({"text": f"{n}"}) for n in range(30)))
    assert "documents of" in (found := said(tmp_path / "short.jsonl"))
    assert "tokens, and a sample takes 49. Route more documents" in found
    assert "overwrites no folder" in said(tmp_path / "nothing.jsonl", "talk")  # before it is looked for
    shard = folder / shard_of((0,))
    shard.write_text("".join(shard.read_text().splitlines(keepends=True)[:-1]))
    shared, _ = read_shared(folder)
    answer = weft("compose", "path", folder, "0")
    assert answer.code == 2
    assert f"{shared.documents[0] - 1} documents, and paths.json names {shared.documents[0]}" in answer.err


def test_nobody_trains_on_nothing_where_nothing_is_held_out(weft: Weft, home: Path, text: Path, tmp_path: Path) -> None:
    write(home, "seed", 1)
    line = ("compose", "route", "seed", tmp_path / "talk", "--data", text, "--levels", "2", "--heldout", "0")
    answer = weft(*line)
    assert answer.code == 0, answer.err
    shared, _ = read_shared(tmp_path / "talk")
    assert sum(shared.documents) == len(documents(40)) - 6  # a twentieth is kept apart for routers
    assert not any((tmp_path / "talk" / shard_of(way, is_heldout=True)).read_bytes() for way in shared.cut.paths)


def test_what_a_run_took_that_paths_begin_with_is_told_in_their_folder(
    weft: Weft, run_path: Path, home: Path, text: Path, tmp_path: Path
) -> None:
    run_path.write_text(RUN.replace("seq_len = 16", "seq_len = 48"))
    kept = saved(run_path, home)
    as_trained(kept.folder, 3, 1, tokens=320)
    answer = weft("compose", "route", kept.folder, tmp_path / "talk", "--data", text, "--levels", "2")
    assert answer.code == 0, answer.err
    told = read_member(tmp_path / "talk" / SEED)
    assert (told.run, told.tokens) == (kept.run.run, 320)
    assert told.flops == int(320 * flops_per_token(decoder(told.model), 48))


def test_what_paths_took_is_told_and_whether_one_model_took_as_much(
    trained: Path, weft: Weft, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("".join(each.text for each in documents(30)[26:]))
    given = ("compose", "evaluate", trained, "--data", tmp_path / "other.txt")
    shared, _ = read_shared(trained)
    tokens = 3 * 2 * 8 * 48 * 2  # rounds, steps, samples, tokens of each, paths
    took = FLOPS + int(tokens * flops_per_token(decoder(shared.model), 48))
    report = json.loads(weft(*given, "--no-monolith", "--json").out)
    assert report["flops"] == report["controls"]["ensemble"]["flops"] == took
    assert report["controls"]["seed"]["flops"] == FLOPS
    write(home, "large", 3, flops=took // 2)
    answer = weft(*given, "--monolith", "large")
    assert "it took 0.5 of the computing" in answer.out
    shutil.rmtree(home / "members" / "large")
    write(home, "large", 3, flops=3 * took)
    assert "it took 3 times the computing" in weft(*given, "--monolith", "large").out
    shutil.move(trained / SEED / "member.json", tmp_path / "member.json")
    assert "what talk took is not known" in weft(*given, "--monolith", "large").out
    shutil.move(tmp_path / "member.json", trained / SEED / "member.json")
