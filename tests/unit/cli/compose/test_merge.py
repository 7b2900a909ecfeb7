"""`weft compose merge`: a mixture from the command line, beside its control, and served."""

import json
from pathlib import Path

import pytest

from unit.cli.compose.made import FLOPS, PARENT, WORDS, served, write, write_all
from unit.cli.small import TEXT, Weft
from weft.cli.options import Numbers
from weft.cli.serve.composed import composed_at, open_composed
from weft.cli.serve.loading import How, prepared
from weft.compose.composed import Merged, read_composed
from weft.compose.descent import Descent
from weft.compose.experts.mixtral import read_mixture
from weft.compose.experts.mixture import mix, mixture_layout
from weft.compose.experts.soup import Ingredient
from weft.compose.member import read_member
from weft.engine.draw import Drawing
from weft.engine.text import Wanted
from weft.errors import ConfigError
from weft.model.flat import layout
from weft.model.weights import read_folder

QUICK = "--steps", "3", "--batch-size", "2", "--seq-len", "16"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def read(folder: Path) -> Merged:
    found = read_composed(folder)
    assert isinstance(found, Merged)
    return found


async def test_a_mixture_is_written_with_its_control_told_exported_and_served(
    weft: Weft, home: Path, text: Path, tmp_path: Path
) -> None:
    write_all(home, ["a", "b", "c"])
    answer = weft("compose", "merge", "a", "b", "c", "--data", text, "--name", "one", *QUICK)
    assert answer.code == 0, answer.err
    folder = home / "composed" / "one"
    told = read(folder)
    assert (told.members, told.top, told.thawed) == (("a", "b", "c"), 2, ("router",))
    assert read_member(folder / "continued").origins[-1].flops == told.flops
    # What is frozen keeps its bits: each expert's networks are its own.
    config, vector = read_mixture(folder / "mixture")
    assert (config.num_experts, config.top_k) == (3, 2)
    there = mixture_layout(config)
    for number, name in enumerate("abc"):
        model, own = read_folder(home / "members" / name)
        spans = {span.name: span for span in layout(model)}
        for span in there:
            layer, _, rest = span.name.partition(f".ffn.experts.{number}.")
            if rest:
                assert there.view(vector, span).equal(layout(model).view(own, spans[f"{layer}.ffn.{rest}"]))
    begun = mix(model, [Ingredient(name, read_folder(home / "members" / name)[1], PARENT) for name in "abc"], 0)[1]
    for span in there:  # and so do the ends, attention and norms: the router alone was trained
        assert there.view(vector, span).equal(there.view(begun, span)) == (".router." not in span.name), span.name
    (tmp_path / "other.txt").write_text("class A:\n    pass\n" * 60)
    said = weft("compose", "evaluate", "one", "--data", tmp_path / "other.txt", "--no-monolith", "--json")
    found = json.loads(said.out)
    assert list(found["controls"]) == ["best single", "ensemble", "continued", "monolith"]
    assert found["flops"] == 3 * FLOPS + told.flops
    assert "one: mixture of a, b, c" in weft("compose", "list").out
    assert weft("compose", "export", "one", tmp_path / "folder").code == 0
    assert read_mixture(tmp_path / "folder")[1].equal(vector)
    assert "exists" in weft("compose", "export", "one", tmp_path / "folder").err
    for given in ("one", str(tmp_path / "folder")):
        place = composed_at(given, home)
        assert place is not None
        loaded = served(place, "", How(device="cpu", cache="1MB"), home)
        try:
            prompt = tuple(int(each) for each in WORDS.encode("def f"))
            begun = loaded.engine.begin(Wanted("key", prompt, 6, Drawing(temperature=0.0)))
            assert len([each async for each in begun]) == 6
        finally:
            loaded.engine.close()
    with pytest.raises(ConfigError, match="a mixture has no exact numbers"):
        open_composed(tmp_path / "folder", "", prepared(How(device="cpu", numbers=Numbers.exact)), home)


def test_a_merge_that_was_stopped_goes_on_to_the_same_bits(
    weft: Weft, home: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(home, ["a", "b"])
    line = ("compose", "merge", "a", "b", "--data", text, "--thaw", "all", *QUICK)
    assert weft(*line, "--name", "whole").code == 0
    monkeypatch.setattr("weft.compose.shelf.SAVE_S", 0.0)
    step, made = Descent.step, list[float]()

    def stopped(self: Descent) -> float:
        if len(made) in (2, 7):
            made.append(0.0)
            raise KeyboardInterrupt
        made.append(step(self))
        return made[-1]

    monkeypatch.setattr(Descent, "step", stopped)
    codes = [weft(*line, "--name", "pieces").code for _ in range(3)]
    assert codes[-1] == 0
    assert 0 not in codes[:-1]
    one, other = home / "composed" / "whole", home / "composed" / "pieces"
    assert read_mixture(one / "mixture")[1].equal(read_mixture(other / "mixture")[1])
    assert read_member(one / "continued").weights == read_member(other / "continued").weights


def test_what_cannot_be_merged_is_refused(weft: Weft, home: Path, text: Path) -> None:
    from msgspec import structs

    from weft.model.weights import write_json

    write_all(home, ["a", "b"])
    write_json(home / "members" / "c" / "member.json", structs.replace(write(home, "c", 9), parent=None))
    for line, words in ((["a", "c"], "cannot be averaged"), (["a", "b", "--top", "3"], "--top 3 of 2")):
        answer = weft("compose", "merge", *line, "--data", text, "--name", "x")
        assert answer.code == 2
        assert words in answer.err
