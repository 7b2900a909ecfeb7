"""`weft compose split | mix`, and what is mixed is told and served."""

import json
from pathlib import Path

import pytest
import torch
from msgspec import structs

from unit.cli.compose.made import FLOPS, WORDS, served, write, write_all
from unit.cli.small import Kept, Weft
from unit.compose.experts.texts import documents
from weft.cli.model.trained import Trained
from weft.cli.options import Numbers
from weft.cli.serve.composed import open_composed
from weft.cli.serve.loading import How, prepared
from weft.compose.asking import weighting_of
from weft.compose.composed import Experts, read_composed
from weft.compose.experts.ensemble import Distance, Posterior, TopK, Uniform
from weft.compose.member import Origin, read_member
from weft.compose.registry import write_member
from weft.data.tokenizer import JsonTokenizer
from weft.engine.draw import Drawing
from weft.engine.text import Wanted
from weft.errors import ConfigError
from weft.model.flat import assemble
from weft.model.weights import read_folder, write_json
from weft.store.chunks import raw
from weft.wire import digest

SHORT = "--seq-len", "16"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = [json.dumps({"name": each.name, "text": each.text}) for each in documents(30)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path / "text.jsonl"


def read(folder: Path) -> Experts:
    found = read_composed(folder)
    assert isinstance(found, Experts)
    return found


def test_documents_are_sorted_and_others_sort_theirs_alike(weft: Weft, text: Path, tmp_path: Path) -> None:
    answer = weft("compose", "split", tmp_path / "parts", "--data", text, "--num", "3")
    assert answer.code == 0, answer.err
    assert len(answer.out.splitlines()) == 3
    assert weft("compose", "split", tmp_path / "theirs", "--data", text, "--clusters", tmp_path / "parts").code == 0
    for file in ("cluster-000.jsonl", "cluster-002.heldout.jsonl", "clusters.bin"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    idle = weft("compose", "split", tmp_path / "x", "--data", text, "--clusters", tmp_path / "parts", "--num", "5")
    assert "--clusters says how many" in idle.err
    wrong = weft("compose", "split", tmp_path / "x", "--data", text, "--clusters", tmp_path)
    assert "`weft compose split` wrote" in wrong.err


@pytest.mark.parametrize("how", ["posterior", "distance", "uniform"])
def test_experts_are_mixed_told_and_served(weft: Weft, home: Path, text: Path, tmp_path: Path, how: str) -> None:
    write_all(home, ["a", "b", "c"])
    weft("compose", "split", tmp_path / "parts", "--data", text, "--num", "3")
    more = ("--clusters", tmp_path / "parts") if how == "distance" else ()
    line = ("compose", "mix", "a", "b", "c", "--data", text, "--name", "all", "--how", how, "--top", "2", *more, *SHORT)
    answer = weft(*line)
    assert answer.code == 0, answer.err
    folder = home / "composed" / "all"
    told = read(folder)
    assert sum(told.prior) == pytest.approx(1.0, abs=1e-5)
    weighting = weighting_of(folder, told, WORDS)
    assert isinstance(weighting, TopK)
    assert isinstance(weighting._weighting, {"posterior": Posterior, "distance": Distance, "uniform": Uniform}[how])
    (tmp_path / "other.txt").write_text("the comet and the anchor, with a pear from the orbit. " * 40)
    said = weft("compose", "evaluate", "all", "--data", tmp_path / "other.txt", "--no-monolith", "--json")
    found = json.loads(said.out)
    assert list(found["controls"]) == ["best single", "ensemble", "monolith"]
    assert found["exits"] == []
    if how == "uniform":
        assert abs(found["loss"] - found["controls"]["ensemble"]["loss"]) > 1e-4  # of the first two alone
    assert "experts of a, b, c" in weft("compose", "list").out
    assert "weft serve" in weft("compose", "export", "all", tmp_path / "one").err


def test_experts_that_count_alike_are_the_control(weft: Weft, home: Path, text: Path, tmp_path: Path) -> None:
    write_all(home, ["a", "b", "c"])
    other = tmp_path / "other.txt"
    other.write_text("a harbour and a mast, " * 60)
    assert weft("compose", "mix", "a", "b", "c", "--data", text, "--name", "all", "--how", "uniform", *SHORT).code == 0
    found = json.loads(weft("compose", "evaluate", "all", "--data", other, "--no-monolith", "--json").out)
    assert found["loss"] == pytest.approx(found["controls"]["ensemble"]["loss"], abs=1e-5)
    assert weft("compose", "mix", "a", "b", "c", "--data", other, "--name", "p", *SHORT).code == 0
    lines = other.read_text()
    other.write_text(lines[700:] + lines[:700])
    assert weft("compose", "mix", "a", "b", "c", "--data", other, "--name", "q", *SHORT).code == 0
    one, same = (read(home / "composed" / name).prior for name in "pq")
    assert one == pytest.approx(same, abs=0.1)  # what comes last counts no more than what comes first
    said = weft("compose", "evaluate", "q", "--data", other, "--no-monolith")
    assert said.code == 2
    assert "chosen by" in said.err


async def test_a_server_asks_experts_together(weft: Weft, home: Path, text: Path) -> None:
    write_all(home, ["a", "b"])
    assert weft("compose", "mix", "a", "b", "--data", text, "--name", "both", *SHORT).code == 0
    assert "no paths" in weft("serve", "both", "--route-every", "9").err
    loaded = served(home / "composed" / "both", "both", How(device="cpu", cache="1MB"), home)
    engine = loaded.engine
    try:
        assert loaded.id == "both"
        prompt = tuple(int(each) for each in WORDS.encode("the harbour"))
        begun = engine.begin(Wanted("key", prompt, 8, Drawing(temperature=0.0)))
        assert len([each async for each in begun]) == 8
    finally:
        engine.close()
    with pytest.raises(ConfigError, match="asked together have no exact numbers"):
        open_composed(home / "composed" / "both", "", prepared(How(device="cpu", numbers=Numbers.exact)), home)


def test_a_soup_is_a_member_where_members_began_alike(weft: Weft, home: Path, text: Path) -> None:
    for name in "ab":  # alike, so that their mean is no worse
        write(home, name, 1)
    answer = weft("compose", "mix", "a", "b", "--data", text, "--name", "one", "--how", "soup")
    assert answer.code == 0, answer.err
    assert answer.err.endswith("beside its controls: weft compose evaluate one --data TEXT --monolith MEMBER\n")
    made = read_member(home / "members" / "one")
    assert made.origins[-1].how == "soup"
    taken = [name for name in "ab" if name in answer.err.split("mean of ")[1].split(":")[0].split(", ")]
    assert len(taken) > 1
    assert made.origins[-1].of == tuple(read_member(home / "members" / name).weights for name in taken)
    vectors = [read_folder(home / "members" / name)[1] for name in taken]
    assert read_folder(home / "members" / "one")[1].allclose(sum(vectors) / len(vectors), atol=1e-7)


def test_a_soup_is_told_beside_what_it_is_the_mean_of(weft: Weft, home: Path, tmp_path: Path) -> None:
    members = write_all(home, ["a", "b"])
    (config, first), (_, second) = (read_folder(home / "members" / name) for name in "ab")
    mean = Trained(tmp_path, config, (first + second) / 2, WORDS, None)
    soup = structs.replace(
        members[0],
        name="one",
        weights=digest(raw(mean.vector)),
        origins=(*members[0].origins, *members[1].origins, Origin(how="soup", of=tuple(m.weights for m in members))),
    )
    write_member(home / "members" / "one", soup, mean.export)
    other = tmp_path / "other.txt"
    other.write_text("the comet and the anchor, with a pear from the orbit. " * 40)
    given = ("compose", "evaluate", "one", "--data", other)
    assert "--monolith MEMBER" in weft(*given).err
    write(home, "whole", 3, flops=10 * FLOPS)
    found = json.loads(weft(*given, "--monolith", "whole", "--json").out)
    assert list(found["controls"]) == ["best single", "ensemble", "monolith"]
    assert found["flops"] == 2 * FLOPS
    alone = {each["name"]: each["loss"] for each in found["members"]}
    assert found["controls"]["best single"]["loss"] == min(alone.values())
    ids = torch.from_numpy(WORDS.encode(other.read_text()).astype("int64"))
    num = (len(ids) - 1) // 64
    likely = assemble(config, mean.vector)(ids[: 64 * num].view(num, 64)).log_softmax(-1)
    targets = ids[1 : 64 * num + 1].view(num, 64, 1)
    assert found["loss"] == pytest.approx(-float(likely.gather(-1, targets).mean()), abs=1e-5)
    people = weft(*given, "--monolith", "whole").out
    assert "one: the mean of a, b" in people
    assert "best single member, chosen on this text" in people
    assert "it took 5 times the computing" in people
    assert "a member of one itself" in weft(*given, "--monolith", "a").err
    for name in "ab":
        assert weft("compose", "remove", name).code == 0
    written = structs.replace(soup, origins=(Origin(how="soup", of=(soup.weights,)),))
    write_json(home / "members" / "one" / "member.json", written)  # of one member alone, which it is not itself
    assert "a mean of members that are not in this home" in weft(*given, "--no-monolith").err
    assert "is no composed model" in weft("compose", "evaluate", "whole", "--data", other, "--no-monolith").err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["a", "b", "--how", "distance"], "wants --clusters"),
        (["a", "b", "--top", "3"], "--top 3 of 2"),
        (["a", "b", "--clusters", "x"], "only --how distance"),
        (["a", "other", "--how", "soup"], "cannot be averaged"),
        (["a", "b", "--how", "soup", "--top", "1"], "a soup is one model"),
    ],
)
def test_what_cannot_be_mixed_is_refused(weft: Weft, home: Path, text: Path, line: list[str], words: str) -> None:
    write_all(home, ["a", "b"])
    changed = structs.replace(write(home, "other", 9), parent=None)
    write_json(home / "members" / "other" / "member.json", changed)
    answer = weft("compose", "mix", *line, "--data", text, "--name", "x")
    assert answer.code == 2
    assert words in answer.err


def test_a_tokenizer_is_one_by_what_it_does(weft: Weft, kept: Kept, home: Path, text: Path, tmp_path: Path) -> None:
    """An exported folder has the run's tokenizer as a file, which has another digest."""
    assert weft("compose", "member", kept.folder, "--name", "ours").code == 0
    assert weft("export", kept.folder, tmp_path / "folder").code == 0
    assert weft("compose", "member", tmp_path / "folder", "--name", "theirs").code == 0
    ours, theirs = (read_member(home / "members" / name) for name in ("ours", "theirs"))
    assert ours.tokenizer != theirs.tokenizer
    mixed = weft("compose", "mix", "ours", "theirs", "--data", text, "--name", "both", *SHORT)
    assert mixed.code == 0, mixed.err
    (tmp_path / "other.txt").write_text("the comet and the anchor, with a pear from the orbit. " * 40)
    write(home, "whole", 3)
    given = ("compose", "evaluate", "both", "--data", tmp_path / "other.txt", "--monolith", "whole")
    assert weft(*given).code == 0
    other = JsonTokenizer(WORDS.to_json().replace(b'"a":97', b'"a":98').replace(b'"b":98', b'"b":97'), 256)
    (home / "members" / "theirs" / "tokenizer.json").write_bytes(other.to_json())
    assert "have different tokenizers" in weft("compose", "mix", "ours", "theirs", "--data", text, "--name", "x").err
