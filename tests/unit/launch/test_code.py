"""A file that this machine's owner names is run and kept; what is kept is known again, and nobody else's is."""

from pathlib import Path

import msgspec
import pytest

from unit.training.test_rewarded import made, write_base
from weft import extension
from weft.errors import ConfigError
from weft.events import Event, Notice
from weft.extension import knows, learn_from, source_of
from weft.launch.code import learn, recall
from weft.launch.corpus import ONE
from weft.launch.session import Options
from weft.run.machine import PeerConfig
from weft.run.reward import ExtensionReward, JudgeConfig, with_judge
from weft.store.home import Home

JUDGE = 'import weft\n\nweft.extend("test.ones", lambda: lambda prompt, answers, said: 1.0)\n'


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_KNOWN", {})


def options(home: Path, *code: Path) -> Options:
    return Options(home=Home(home), key=None, settings=PeerConfig(code=tuple(map(str, code))))


def test_it_is_known_after_a_restart_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, told = tmp_path / "judge.py", list[Event]()
    file.write_text(JUDGE)
    learn(options(tmp_path / "home", file), told.append)
    reward = with_judge(ExtensionReward(judge=JudgeConfig(name="test.ones")))
    assert isinstance(reward, ExtensionReward)
    source = reward.judge.source
    assert [each.text for each in told if isinstance(each, Notice)] == [
        f"judge.py is known here as test.ones, its text as {source}"
    ]
    file.unlink()
    run = made(write_base(tmp_path), reward=msgspec.to_builtins(reward)).config
    monkeypatch.setattr(extension, "_KNOWN", {})
    recall(run, Home(tmp_path / "elsewhere"))
    assert not knows(reward.judge)
    recall(run, Home(tmp_path / "home"))
    assert knows(reward.judge)
    assert extension.make(reward.judge)("", (), "") == 1.0


def test_what_was_changed_on_disk_is_not_what_the_run_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "judge.py"
    file.write_text(JUDGE)
    learn(options(tmp_path / "home", file), lambda _event: None)
    reward = ExtensionReward(judge=JudgeConfig(name="test.ones"))
    run = made(write_base(tmp_path), reward=msgspec.to_builtins(reward)).config
    assert isinstance(run.reward, ExtensionReward)
    (kept,) = (tmp_path / "home" / "code").iterdir()
    kept.write_text(JUDGE.replace("1.0", "0.0"))
    kept.write_text(kept.read_text() + f"open({str(tmp_path / 'run')!r}, 'w')\n")
    monkeypatch.setattr(extension, "_KNOWN", {})
    with pytest.raises(ConfigError, match="it is not the text that was kept there"):
        recall(run, Home(tmp_path / "home"))
    assert not knows(run.reward.judge)
    assert not (tmp_path / "run").exists()


def test_a_text_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    file, told = tmp_path / "judge.py", list[Event]()
    file.write_text(JUDGE)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "code").write_text("no folder")
    learn(options(tmp_path / "home", file), told.append)
    assert "give it again at the next start" in [each.text for each in told if isinstance(each, Notice)][-1]


def test_who_only_draws_needs_no_judge(tmp_path: Path) -> None:
    source = "ab" * 32
    reward = ExtensionReward(judge=JudgeConfig(name="test.unheard", source=source))
    run = made(write_base(tmp_path), reward=msgspec.to_builtins(reward)).config
    ONE.check_fits(run, PeerConfig(device="cpu", is_drawing_only=True))
    with pytest.raises(ConfigError, match="none of that name"):
        ONE.check_fits(run, PeerConfig(device="cpu"))


def test_a_text_may_begin_with_a_mark_of_its_order(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("\ufeff" + JUDGE, encoding="utf-8")
    assert [known.name for known in learn_from(tmp_path / "judge.py")] == ["test.ones"]


def test_a_name_that_no_file_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no name of a file"):
        learn_from(Path("a\0b"))


def test_what_was_learnt_last_is_what_a_name_means(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(JUDGE)
    second.write_text(JUDGE + "# another\n")
    (one,), (two,) = learn_from(first), learn_from(second)
    assert source_of("test.ones") == two.source != one.source
    learn_from(first)
    assert source_of("test.ones") == one.source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("# \udcff", "it is not UTF-8"),
        ("import weft\n", "has not called weft.extend"),
        ("import weft\n1 / 0\n", "it fails: ZeroDivisionError"),
        ("def f(:\n", "it fails: SyntaxError"),
        ('import weft\nweft.extend("Not a name", print)\n', "it fails: ConfigError: an extension's name"),
    ],
)
def test_a_file_that_teaches_nothing_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "judge.py"
    if text is not None:
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=said):
        learn_from(file)


def test_a_file_may_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(JUDGE)
    assert [known.name for known in learn_from(file)] == [known.name for known in learn_from(file)] == ["test.ones"]
