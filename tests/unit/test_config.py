"""Settings: what is written comes back, and every mistake is one sentence that says file, field, value and way out."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config import UNBOUNDED, Config, dump, from_tree, load, load_tree, replace_field
from weft.errors import ConfigError
from weft.run.config import RunFile
from weft.sync.method.schedule import ScheduleConfig

Rate = Annotated[float, msgspec.Meta(gt=0, le=10, description="step size of the outer update")]


class Sgd(Config, frozen=True, kw_only=True, tag_field="kind", tag="sgd"):
    learning_rate: Rate = 1.0


class Nesterov(Config, frozen=True, kw_only=True, tag_field="kind", tag="nesterov"):
    learning_rate: Rate = 0.7
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9


class Scheduled(Config, frozen=True, kw_only=True):
    schedule: ScheduleConfig


class Method(Config, frozen=True, kw_only=True):
    every: Annotated[int, msgspec.Meta(ge=1, le=100_000, description="inner steps between rounds")] = 1
    send: Literal["gradient", "delta"] = "delta"
    apply: Sgd | Nesterov = Sgd()
    seed: int
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=3)] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    shares: dict[str, int] = msgspec.field(default_factory=dict)
    limit: int | None = None
    stages: tuple[Sgd | Nesterov, ...] = ()
    word: Annotated[str, msgspec.Meta(pattern="^[a-z]+$", min_length=2, max_length=5)] = "weft"
    width: Annotated[int, msgspec.Meta(multiple_of=4)] = 4
    is_open: bool = True
    first: int = 0
    last: int = 10

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError(f"last ({self.last}) must not be below first ({self.first})")


class Run(Config, frozen=True, kw_only=True):
    method: Method
    title: str = ""


def complaint(**method: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_tree({"method": {"seed": 1, **method}}, Run, where="run.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        # unknown
        ({"evry": 3}, '[method] has no field "evry". Did you mean "every"? Allowed here: apply, betas, every'),
        ({"zzzz": 3}, '[method] has no field "zzzz". Allowed here: apply'),
        ({"apply": {"kind": "sgd", "momentum": 0.9}}, '[method.apply] has no field "momentum". Allowed here: kind, l'),
        (
            {"apply": {"kind": "nesterov", "momentun": 1}},
            'Did you mean "momentum"? Allowed here: kind, learning_rate, m',
        ),
        ({"stages": [{"kind": "sgd"}, {"kind": "sgd", "x": 1}]}, '[method.stages[1]] has no field "x".'),
        # ill-typed
        ({"seed": "1"}, 'method.seed is "1". Allowed: a whole number.'),
        ({"seed": 1.5}, "method.seed is 1.5. Allowed: a whole number."),
        ({"seed": True}, "method.seed is true. Allowed: a whole number."),
        ({"is_open": 1}, "method.is_open is 1. Allowed: true or false."),
        ({"limit": "many"}, 'method.limit is "many". Allowed: a whole number, or leave it out.'),
        ({"names": "a"}, 'method.names is "a". Allowed: a list [...], at most 3, each text in quotes.'),
        ({"names": ["a", 3]}, "method.names[1] is 3. Allowed: text in quotes."),
        ({"betas": [0.9]}, "method.betas is [0.9]. Allowed: a list [...] of 2: a number, a number."),
        ({"betas": [0.9, "x"]}, 'method.betas[1] is "x". Allowed: a number.'),
        ({"shares": {"a": 1, "b": "two"}}, 'method.shares.b is "two". Allowed: a whole number.'),
        ({"shares": 3}, "method.shares is 3. Allowed: a table."),
        ({"apply": "sgd"}, 'method.apply is "sgd". Allowed: a table.'),
        ({"every": {"n": 1}}, "method.every is a table. Allowed: a whole number, at least 1, at most 100000 (inner st"),
        # out of range
        (
            {"every": 0},
            "method.every is 0. Allowed: a whole number, at least 1, at most 100000 (inner steps between rounds).",
        ),
        ({"width": 6}, "method.width is 6. Allowed: a whole number, a multiple of 4."),
        (
            {"apply": {"kind": "nesterov", "momentum": 1}},
            "method.apply.momentum is 1. Allowed: a number, at least 0, below 1.",
        ),
        (
            {"apply": {"kind": "sgd", "learning_rate": 0}},
            "is 0. Allowed: a number, above 0, at most 10 (step size of the",
        ),
        (
            {"names": ["a"] * 4},
            'method.names is ["a","a","a","a"]. Allowed: a list [...], at most 3, each text in quotes.',
        ),
        (
            {"word": "W"},
            'method.word is "W". Allowed: text in quotes, at least 2 characters, at most 5 characters, matchi',
        ),
        ({"word": "wefts!"}, 'method.word is "wefts!". Allowed: text in quotes'),
        # not a number that can be used
        ({"seed": 2**64}, "method.seed is 18446744073709551616. Allowed: a finite number of at most 64 bits."),
        ({"betas": [0.9, float("nan")]}, "method.betas[1] is nan. Allowed: a finite number"),
        (
            {"apply": {"kind": "sgd", "learning_rate": float("inf")}},
            "method.apply.learning_rate is inf. Allowed: a finite",
        ),
        # enumerations and tags
        ({"send": "gradeint"}, 'method.send is "gradeint". Did you mean "gradient"? Allowed: "delta" or "gradient".'),
        ({"send": 3}, 'method.send is 3. Allowed: "delta" or "gradient".'),
        (
            {"apply": {"kind": "nestorov"}},
            'method.apply.kind is "nestorov". Did you mean "nesterov"? Allowed: "nesterov" or',
        ),
        ({"apply": {"kind": 3}}, 'method.apply.kind is 3. Allowed: "nesterov" or "sgd".'),
        (
            {"apply": {"kind": ["sgd"]}},
            'method.apply.kind is ["sgd"]. Did you mean "sgd"? Allowed: "nesterov" or "sgd".',
        ),
        (
            {"apply": {"learning_rate": 1}},
            '[method.apply] needs the field "kind", which is missing. Allowed: "nesterov" or "',
        ),
        # between fields
        ({"first": 3, "last": 2}, "method: last (2) must not be below first (3)."),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(method: dict[str, Any], said: str) -> None:
    found = complaint(**method)
    assert found.startswith("run.toml: ")
    assert said in found
    assert "\n" not in found
    assert found.endswith(".")


class Clipped(Config, frozen=True, kw_only=True, tag_field="kind", tag="clipped"):
    clip: Annotated[float, msgspec.Meta(gt=0, extra=UNBOUNDED)] = 1.0
    rate: float = 1.0


class Step(Config, frozen=True, kw_only=True):
    apply: Sgd | Clipped
    clip: float = 1.0


def test_a_rule_between_fields_names_their_section_once() -> None:
    schedule = {"type": "wsd", "decay_tokens": 9, "total_tokens": 3}
    with pytest.raises(ConfigError) as said:
        from_tree({"schedule": schedule}, Scheduled, where="run.toml")
    assert str(said.value).startswith("run.toml: schedule: total_tokens: 3 is less than the 9 tokens")


def test_whole_numbers_may_be_spelled_as_floats_are() -> None:
    train = {"tokens": 1e6, "schedule": {"type": "constant", "lr": 1.0}}
    found = from_tree({"name": "x", "train": train}, RunFile, where="run.toml").train
    assert (found.tokens, type(found.tokens)) == (1_000_000, int)
    with pytest.raises(ConfigError, match="tokens"):
        from_tree({"name": "x", "train": train | {"tokens": 1.5}}, RunFile, where="run.toml")


@pytest.mark.parametrize("schedule", [{"type": "wsd", "decay_tokens": 9}, {"type": "cosine", "floor": 0.0}])
def test_tokens_that_would_be_trained_at_a_rate_of_0_are_refused(schedule: dict[str, Any]) -> None:
    train = {"tokens": 101, "schedule": schedule | {"total_tokens": 100}}
    with pytest.raises(ConfigError, match=r"train\.tokens is 101, and from 100 on, train\.schedule\.total_tokens"):
        from_tree({"name": "x", "train": train}, RunFile, where="run.toml")
    for enough in (train | {"tokens": 100}, train | {"schedule": train["schedule"] | {"floor": 0.1}}):
        from_tree({"name": "x", "train": enough}, RunFile, where="run.toml")


def test_infinity_is_a_value_where_a_field_says_so() -> None:
    tree = {"apply": {"kind": "clipped", "clip": float("inf")}}
    step: Step = from_tree(tree, Step, where="run.toml")
    assert isinstance(step.apply, Clipped)
    assert step.apply.clip == float("inf")
    assert from_tree(tomllib.loads(dump(step)), Step, where="run.toml") == step


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"apply": {"kind": "clipped", "clip": float("-inf")}}, "apply.clip is -inf"),
        ({"apply": {"kind": "clipped", "clip": float("nan")}}, "apply.clip is nan"),
        ({"apply": {"kind": "clipped", "rate": float("inf")}}, "apply.rate is inf"),
        ({"apply": {"kind": "clipped"}, "clip": float("inf")}, "clip is inf"),
    ],
)
def test_it_is_none_anywhere_else(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^run.toml: {words}"):
        from_tree(tree, Step, where="run.toml")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        from_tree({"method": {}}, Run, where="run.toml")
    assert str(caught.value) == 'run.toml: [method] needs the field "seed", which is missing. Allowed: a whole number.'
    with pytest.raises(ConfigError, match='top level needs the field "method", which is missing'):
        from_tree({}, Run, where="run.toml")


def test_an_unknown_field_at_the_top_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        from_tree({"method": {"seed": 1}, "titel": "x"}, Run, where="run.toml")
    said = 'run.toml: the file\'s top level has no field "titel". Did you mean "title"? Allowed here: method, title.'
    assert str(caught.value) == said


def test_a_long_value_is_cut() -> None:
    assert len(complaint(seed="x" * 10_000)) < 200


TREES = st.recursive(
    st.one_of(
        st.integers(), st.floats(), st.booleans(), st.text(max_size=8), st.sampled_from(["sgd", "nesterov", "delta"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from([*Method.__struct_fields__, "kind", "momentum"]), st.text(max_size=4)), inner
        ),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(Method.__struct_fields__), TREES))
def test_no_tree_does_more_than_a_config_error(method: dict[str, Any]) -> None:
    try:
        config = from_tree({"method": {"seed": 1, **method}}, Run, where="run.toml")
    except ConfigError:
        return
    assert from_tree(msgspec.to_builtins(config), Run, where="again") == config


# --- files ---


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'title = "é"\n[method]\nseed = 7\nbetas = [1, 0.5]\n[method.apply]\nkind = "nesterov"\n', encoding="utf-8"
    )
    assert load(path, Run) == Run(title="é", method=Method(seed=7, betas=(1.0, 0.5), apply=Nesterov()))
    assert load_tree(path)["method"]["seed"] == 7


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'name = "open\nseed = 1', "A quote is not closed in that line."),
        (b"seed = 7", "It belongs under [method]."),
        (b"[method\nseed = 1", "not valid TOML"),
        (b"seed = 1\nseed = 2", "not valid TOML"),
        (b"title = '\xff'", "byte 10 is not UTF-8 text"),
        (b"[method]\nseed = 'x'", 'method.seed is "x"'),
        (b"[method]\nseed = 1979-05-27", 'method.seed is "1979-05-27"'),
    ],
)
def test_a_file_with_a_mistake_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path, Run)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: no such file"):
        load(tmp_path / "absent.toml", Run)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, Run)


@given(
    st.builds(
        Run,
        title=st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
        method=st.builds(
            Method,
            seed=st.integers(-(2**63), 2**63 - 1),
            apply=st.one_of(
                st.builds(Sgd, learning_rate=st.floats(1e-300, 10)),
                st.builds(Nesterov, learning_rate=st.floats(1e-300, 10), momentum=st.floats(0, 1, exclude_max=True)),
            ),
            limit=st.none() | st.integers(0, 10),
            names=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), max_size=3).map(tuple),
            stages=st.lists(st.builds(Sgd), max_size=2).map(tuple),
            first=st.just(0),
            last=st.integers(0, 9),
        ),
    )
)
def test_what_is_written_is_read_back_equal(config: Run) -> None:
    assert from_tree(tomllib.loads(dump(config)), Run, where="dump") == config


# --- arguments beat files ---


def test_an_argument_replaces_a_field_and_makes_the_sections_it_needs() -> None:
    tree: dict[str, Any] = {"method": {"seed": 1}}
    replace_field(tree, "method.seed", 2)
    replace_field(tree, "method.apply.kind", "nesterov")
    replace_field(tree, "title", "t")
    assert from_tree(tree, Run, where="x") == Run(title="t", method=Method(seed=2, apply=Nesterov()))


def test_an_argument_below_a_plain_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set title\.x: title is a value"):
        replace_field({"title": "t"}, "title.x", 1)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_no_part_of_a_file(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes('title = "ü"'.encode(encoding))
    assert load_tree(tmp_path / "run.toml") == {"title": "ü"}


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        ("a = " + "[" * 3000 + "]" * 3000, "nested deeper than 100"),
        ("a = " + "[" * 101 + "]" * 101, "nested deeper than 100"),
        ("[" + ".".join("a" * 5000) + "]", "nested deeper than 100"),
        ("<!DOCTYPE html><html>", "is an HTML page"),
        ("version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ],
)
def test_a_file_that_no_person_wrote_is_refused(whole: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(whole)
    with pytest.raises(ConfigError, match=words):
        load_tree(tmp_path / "run.toml")


def test_a_name_that_leads_too_deep_is_refused() -> None:
    with pytest.raises(ConfigError, match="names 4999 sections"):
        replace_field({}, ".".join("a" * 5000), 1)
