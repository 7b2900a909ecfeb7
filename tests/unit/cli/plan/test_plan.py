"""`weft plan` from files and options to what it prints."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from unit.cli.small import Kept, Weft, as_trained, saved
from unit.cli.test_bad_input import refused
from weft.cli.plan.question import time
from weft.config import load
from weft.cost.training import EXACT_TIMES
from weft.run.config import RunFile
from weft.store.home import Home

FAST = ("--tokens-per-s", "1000", "--peers", "4")
SCENARIO = """
run = "{run}"
[[kind]]
name = "lab"
count = 3
tokens_per_s = 1000.0
up_mbit = 10.0
[[kind]]
name = "late"
tokens_per_s = 500.0
joins_at_s = 9.0
[[fault]]
type = "kill"
peer = "lab-1"
at_round = 2
"""


def test_a_plan_tells_time_bytes_memory_energy_money_and_method(weft: Weft, run_path: Path) -> None:
    answer = weft(
        "plan", run_path, "--peers", 8, "--up", "20mbit", "--down", "100mbit", "--device", "rtx4090", "--details"
    )
    assert (answer.code, answer.err) == (0, "")
    for word in ("round", "speed", "bytes", "memory", "energy", "money", "data centre", "multiplier", "method", "note"):
        assert any(line.startswith(word) for line in answer.out.splitlines()), word
    assert "8 peers" in answer.out
    assert "* " in answer.out
    assert "165.2 TFLOP/s" in answer.out
    assert "2503.09799" in answer.out


def test_what_is_no_run_file_is_refused_with_the_command_that_is_meant_for_it(weft: Weft, tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("It was a calm sea.\n")
    refused(weft, 2, f"{poem} is no run file. If it is text of your own, weft train {poem} says what", "plan", poem)
    assert "--serve" not in refused(weft, 2, "is no run file", "plan", poem)
    refused(weft, 2, f"If it is a model, weft plan {tmp_path} --serve says how fast", "plan", tmp_path)
    refused(weft, 2, f"weft train {poem} says what that takes", "plan", poem, "--serve")
    refused(weft, 17, "'nothing' is not a run file, or a run of this home", "plan", "nothing")
    refused(weft, 2, "gone.toml: no such file", "plan", tmp_path / "gone.toml")


def test_a_run_of_this_home_is_planned_as_its_run_file_is(weft: Weft, kept: Kept, run_path: Path) -> None:
    as_trained(kept.folder, 3, 5_000)
    by_file = weft("plan", run_path, *FAST, "--details").out
    assert "4 peers" in by_file
    for given in ("last", "small", kept.run.run[:8]):
        answer = weft("plan", given, *FAST, "--details")
        assert (answer.code, answer.err, answer.out) == (0, "", by_file)
    (alone,) = {weft("plan", given, *FAST[:2]).out for given in ("last", run_path)}  # of which it has one member
    assert "1 peer" in alone
    refused(weft, 2, "--set has no effect: a run of this home is planned as it is", "plan", "last", "--set", "seed=1")


def test_without_options_this_machine_is_timed_and_eight_lines_say_what_a_newcomer_needs(
    weft: Weft, run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.plan.speed_here.usual_s", lambda step: step() or 1.0)
    monkeypatch.setattr("weft.cli.plan.speed_here.is_disturbed", lambda *_: False)
    monkeypatch.setattr("weft.training.device.best", lambda: "cpu")
    monkeypatch.setenv("COLUMNS", "80")
    answer = weft("plan", run_path)
    assert answer.code == 0, answer.err
    said = answer.out.splitlines()
    assert len(said) == 8
    assert [line.split()[0] for line in said[1:]] == ["time", "bytes", "memory", "disk", "speed", "lines", "more"]
    assert "timed on this machine" in said[5]
    assert "of text" in said[4]
    for word in ("data centre", "multiplier", "energy  ", "note"):
        assert word not in answer.out


AUDITED = ("--set", 'trust={type = "audited"}', "--set", "train.tokens=400000")


@pytest.fixture
def of_four(run_path: Path) -> Path:
    run_path.write_text(run_path.read_text().replace("peers = 1", "peers = 4"))
    return run_path


def test_a_run_that_audits_is_told_what_that_costs_and_another_is_not(weft: Weft, of_four: Path) -> None:
    short, whole = weft("plan", of_four, *FAST, *AUDITED), weft("plan", of_four, *FAST, *AUDITED, "--details")
    assert (short.code, whole.code) == (0, 0), short.err
    assert "% of the speed without" in short.out
    assert "of this memory for moments" in " ".join(short.out.split())
    assert "at audit_rate = 0.1: " in " ".join(whole.out.split())
    tree = json.loads(weft("plan", of_four, *FAST, *AUDITED, "--json").out)
    plain = json.loads(weft("plan", of_four, *FAST, *AUDITED[2:], "--json").out)
    assert tree["audits"]["speed"] == pytest.approx(tree["tokens_per_s"] / plain["tokens_per_s"])
    assert tree["audits"]["disk_nbytes"] > tree["audits"]["lease_nbytes"]
    assert plain["audits"] is None
    assert "audits" not in weft("plan", of_four, *FAST).out
    other = weft("plan", of_four, *FAST, *AUDITED, "--method", "ddp")
    assert "members cannot audit each other with this method" in " ".join(other.out.split())
    two = weft("plan", of_four, "--tokens-per-s", "1000", "--peers", "2", *AUDITED)
    assert "members cannot audit each other where fewer than 3 are" in " ".join(two.out.split())


def test_a_run_of_this_home_that_audits_is_planned_though_one_member_of_it_is_left(
    weft: Weft, of_four: Path, home: Path
) -> None:
    of_four.write_text(of_four.read_text().replace("peers = 4", 'peers = 4\ntrust = {type = "audited"}', 1))
    as_trained(saved(of_four, home).folder, 3, 5_000)
    alone, four = weft("plan", "last", *FAST[:2], "--details"), weft("plan", "last", *FAST, "--details")
    assert (alone.code, four.code) == (0, 0), alone.err
    assert "where fewer than 3 are" in " ".join(alone.out.split())
    assert "at audit_rate = 0.1: " in " ".join(four.out.split())


def test_steps_in_exact_numbers_are_reckoned_three_times_as_long(weft: Weft, of_four: Path) -> None:
    on = ("--device", "cpu-avx2-8", "--line", "loopback", *AUDITED[2:])
    said = {}
    for numerics in ("fp32", "exact"):
        trust = f'trust={{type = "audited", numerics = "{numerics}"}}'
        answer = weft("plan", of_four, *on, "--set", trust, "--json")
        assert answer.code == 0, answer.err
        said[numerics] = json.loads(answer.out)
    step_s = {name: tree["round"]["train_s"] for name, tree in said.items()}
    assert step_s["exact"] == pytest.approx(EXACT_TIMES * step_s["fp32"], rel=1e-3)
    assert said["fp32"]["audits"]["evidence_nbytes"] == 0 < said["exact"]["audits"]["evidence_nbytes"]
    told = "a step in exact numbers takes 3 times one in fp32"
    assert [any(told in note for note in tree["notes"]) for tree in said.values()] == [False, True]
    exact = ("--set", 'trust={type = "audited", numerics = "exact"}')
    refused(weft, 2, "exact numbers, which are of CPUs", "plan", of_four, "--device", "rtx4090", *exact)


def test_hashing_is_timed_where_training_is(weft: Weft, of_four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.plan.speed_here.usual_s", lambda step, **_: step() or 1.0)
    monkeypatch.setattr("weft.cli.plan.speed_here.is_disturbed", lambda *_: False)
    monkeypatch.setattr("weft.training.device.best", lambda: "cpu")
    tree = json.loads(weft("plan", of_four, *FAST[2:], *AUDITED, "--json").out)
    steps = json.loads(weft("plan", of_four, *FAST, *AUDITED, "--json").out)
    assert tree["audits"]["hash_s"] > 100 * steps["audits"]["hash_s"]  # a second for each state


def test_a_price_is_told_with_all_that_it_buys(weft: Weft, run_path: Path) -> None:
    """Else an option would do nothing."""
    assert "multiplier" not in weft("plan", run_path, *FAST).out
    for option in (("--watts", 300), ("--cluster", "h100-sxm"), ("--price-per-kwh", 0.3)):
        assert "multiplier" in weft("plan", run_path, *FAST, *option).out


def test_memory_is_one_figure_of_plan_and_of_join(
    weft: Weft, run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of train and doctor: what the closed form says of training, and the program itself."""
    from unit.launch.test_terms import HERE, TICKET
    from weft.dashboard import figures
    from weft.launch.terms import terms
    from weft.plan.own_text import unsealed

    monkeypatch.setattr("weft.cli.plan.speed_here.usual_s", lambda step: step() or 1.0)
    monkeypatch.setattr("weft.training.device.best", lambda: "cpu")
    run = unsealed(load(run_path, RunFile), run_path.parent)
    joined = terms(run, TICKET, Home(tmp_path / "there"), HERE)
    told = figures.nbytes(joined.process_nbytes + joined.memory_nbytes)
    assert f"about {told} of each machine" in weft("plan", run_path).out


def test_json_holds_the_same_figures(weft: Weft, run_path: Path) -> None:
    answer = weft("plan", run_path, *FAST, "--watts", 300, "--json")
    tree = json.loads(answer.out)
    assert tree["num_peers"] == 4
    assert tree["round_tokens"] / tree["round"]["total_s"] == pytest.approx(tree["tokens_per_s"])
    assert tree["bill"]["kwh"] > 0
    assert sum(row["is_chosen"] for row in tree["methods"]) == 1
    assert [row["name"] for row in tree["methods"] if row["is_asked"]] == [tree["method"]]


def test_nothing_is_packed_and_the_text_need_not_be_there(weft: Weft, run_path: Path, home: Path) -> None:
    (run_path.parent / "text.txt").unlink()
    assert weft("plan", run_path, *FAST).code == 0
    answer = weft("plan", run_path, *FAST, "--set", "tokenizer.type=characters")
    assert answer.code == 0
    assert "100 different characters are assumed" in answer.out
    assert not (home / "shards").exists()


def test_an_alphabet_that_is_there_is_read(weft: Weft, run_path: Path) -> None:
    answer = weft("plan", run_path, *FAST, "--set", "tokenizer.type=characters", "--json")
    assert "assumed" not in answer.out
    assert json.loads(answer.out)["num_parameters"] < 5000


def test_the_method_can_be_another(weft: Weft, run_path: Path) -> None:
    names = [
        json.loads(weft("plan", run_path, *FAST, "--json", *more).out)["method"]
        for more in (
            (),
            ("--method", "ddp"),
            ("--method", "fedavg"),
            ("--every", 7, "--codec", "bf16"),
            ("--method", "diloco", "--every", 100),
            ("--method", "powersgd"),
        )
    ]
    assert names == [
        "diloco H=30 int8",
        "ddp bf16",
        "fedavg H=30 bf16",
        "diloco H=7 bf16",
        "diloco H=100 int8",
        "powersgd bf16",
    ]


def test_a_scenario_is_planned_kind_by_kind(weft: Weft, run_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO.format(run=run_path.name))
    answer = weft("plan", path)
    assert (answer.code, answer.err) == (0, "")
    assert "3 lab + 1 late" in answer.out
    assert "not part of the plan: 1 fault of the scenario" in answer.out
    assert "join later" in answer.out
    refused = weft("plan", path, "--peers", 3)
    assert refused.code == 2
    assert "is a scenario" in refused.err


@pytest.mark.full
def test_this_machine_is_timed_alone_and_shared(weft: Weft, run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_second(step: Callable[[], None]) -> float:
        step()
        return 1.0

    monkeypatch.setattr("weft.cli.plan.speed_here.usual_s", one_second)
    monkeypatch.setattr("weft.cli.plan.speed_here.is_disturbed", lambda *_: False)
    monkeypatch.setattr("weft.cli.plan.speed_here.num_cores", lambda: 2)
    monkeypatch.setattr("weft.training.device.best", lambda: "cpu")
    options = ("plan", run_path, "--device", "here", "--peers", 8, "--json")
    alone, shared = json.loads(weft(*options).out), json.loads(weft(*options, "--line", "loopback").out)
    assert alone["round"]["train_s"] == pytest.approx(30)
    assert shared["round"]["train_s"] == pytest.approx(4 * 30)
    assert any("8 peers that share this machine" in note for note in shared["notes"])


def test_slower_lines_make_longer_rounds(weft: Weft, run_path: Path) -> None:
    rounds = [
        json.loads(weft("plan", run_path, *FAST, "--json", *more).out)["round"]["total_s"]
        for more in (("--line", "datacentre"), ("--line", "dsl"), ("--line", "dsl", "--delay", "200ms"))
    ]
    assert rounds == sorted(set(rounds))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*FAST, "--json", "--details"), "--json prints everything"),
        (("--device", "rtx9999"), "Known: rtx3060"),
        ((*FAST, "--line", "string"), "Known: home"),
        ((*FAST, "--up", "fast"), "--up fast: Allowed: a rate above 0, such as 20mbit"),
        ((*FAST, "--down", "0mbit"), "--down 0mbit: Allowed: a rate above 0, such as 20mbit"),
        ((*FAST, "--up", "20"), "Write 20mbit"),
        ((*FAST, "--delay", "soon"), "--delay soon: not a time"),
        ((*FAST, "--method", "magic"), "Allowed: ddp, powersgd, fedavg, diloco"),
        ((*FAST, "--codec", "zip"), "Allowed: fp32, bf16, fp8"),
        ((*FAST, "--method", "ddp", "--every", 9), "ddp synchronises after each step"),
        ((*FAST, "--method", "powersgd", "--every", 9), "powersgd synchronises after each step"),
        ((*FAST, "--every", 200_000), "--every"),
        ((*FAST, "--cluster", "abacus"), "--cluster abacus: not known"),
        ((*FAST, "--cluster", "l40s"), "Give --cluster-price"),
        ((*FAST, "--set", "train.tokens=0"), "train.tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(
    weft: Weft, run_path: Path, options: tuple[object, ...], words: str
) -> None:
    answer = weft("plan", run_path, *options)
    assert answer.code == 2
    assert words in answer.err
    assert answer.out == ""


def test_a_model_that_does_not_fit_is_said(weft: Weft, run_path: Path) -> None:
    answer = weft("plan", run_path, "--device", "rtx3060", "--set", 'model={type="size", size="7b"}')
    assert answer.code == 0
    assert "IT DOES NOT FIT" in answer.out
    assert answer.out.count("IT DOES NOT FIT") == 1
    assert "choose a smaller model" in " ".join(answer.out.split())


def test_a_model_too_large_to_time_here_is_refused(weft: Weft, run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.plan.speed_here.host_free_nbytes", lambda: 1000)
    monkeypatch.setattr("weft.training.device.best", lambda: "cpu")
    answer = weft("plan", run_path, "--device", "here")
    assert answer.code == 10
    assert "--tokens-per-s" in answer.err


def test_who_finds_no_room_in_the_electorate_is_planned_as_a_leaf(weft: Weft, run_path: Path) -> None:
    asked = ("plan", run_path, "--tokens-per-s", 1000, "--set", "electors=16", "--peers")
    answer = weft(*asked, 200, "--details")
    assert answer.code == 0
    assert "each of 16 peers with a vote: " in answer.out
    assert "each of 184 peers without a vote: " in answer.out
    assert "find no room" not in answer.out
    assert "without a vote" not in weft(*asked, 16, "--details").out
    assert "16 peers with a vote can take at most 1,008 peers without a vote" in " ".join(
        weft(*asked, 1025).out.split()
    )
    found = json.loads(weft(*asked, 200, "--json").out)
    assert found["num_electors"] == 16
    assert found["levels"]["elector"]["sent_nbytes"] > found["levels"]["ward"]["sent_nbytes"]


def test_a_rate_is_planned_with_as_a_cap_reads_it(weft: Weft, run_path: Path) -> None:
    answers = {weft("plan", run_path, *FAST, "--json", "--up", text).out for text in ("20e6", "20mbps", "20 Mbit/s")}
    assert len(answers) == 1
    assert answers != {weft("plan", run_path, *FAST, "--json", "--up", "30mbit").out}


@pytest.mark.parametrize(("text", "seconds"), [("10ms", 0.01), ("0.5s", 0.5), ("7", 0.007)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert time("--delay", text) == pytest.approx(seconds)


@pytest.mark.parametrize(("name", "words"), [("t4", "8.1 TFLOP/s in fp32"), ("v100-sxm", "15.7 TFLOP/s in fp32")])
def test_a_device_without_bf16_is_reckoned_in_fp32(weft: Weft, run_path: Path, name: str, words: str) -> None:
    assert words in weft("plan", run_path, "--device", name, "--details").out


def test_a_run_file_may_expect_hundreds(weft: Weft, run_path: Path) -> None:
    options = ("plan", run_path, "--tokens-per-s", 1000, "--json", "--set", "peers=200")
    assert json.loads(weft(*options).out)["num_peers"] == 200
    assert "at most 1024" in weft("plan", run_path, "--tokens-per-s", 1000, "--set", "peers=1025").err


def shaped(num_layers: int = 4) -> str:
    return f'model={{type="shape", num_layers={num_layers}, num_heads=2, width=32, ffn_width=64, is_tied=false}}'


def test_a_run_with_stages_is_planned_stage_by_stage(weft: Weft, run_path: Path) -> None:
    options = ("plan", run_path, *FAST, "--set", shaped(), "--set", "stages=2")
    answer = weft(*options)
    assert (answer.code, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines() if line.startswith("  ")]
    assert ["1", "1-2"] in [row[:2] for row in rows]
    assert ["2", "3-4"] in [row[:2] for row in rows]
    for word in ("step", "round", "speed", "bytes", "memory", "teams", "stages", "note"):
        assert any(line.startswith(word) for line in answer.out.splitlines()), word
    found = json.loads(weft(*options, "--json").out)
    assert found["num_stages"] == 2
    assert [stage["layers"] for stage in found["stages"]] == [[0, 2], [2, 4]]
    assert sum(stage["num_members"] for stage in found["stages"]) == found["num_peers"] == 4
    assert found["round_tokens"] / found["round_s"] == pytest.approx(found["tokens_per_s"])
    assert found["num_steps"] * found["step"]["total_s"] + found["exchange_s"] == pytest.approx(found["round_s"])
    assert found["best"]["num_stages"] == 1
    assert "rtx4090" in found["able"]


@pytest.mark.parametrize(("members", "is_alone"), [(2, False), (3, True)])
def test_stages_too_small_for_a_team_are_named(weft: Weft, run_path: Path, members: int, is_alone: bool) -> None:
    split = f'pipeline.split={{by="segments", members={members}}}'
    options = ("plan", run_path, *FAST, "--set", shaped(), "--set", "stages=2", "--set", split, "--json")
    notes = json.loads(weft(*options).out)["notes"]
    assert any(note.startswith("stages 1, 2 have fewer than 3 members") for note in notes) == is_alone


def test_stages_that_cannot_be_are_refused(weft: Weft, run_path: Path) -> None:
    tied = shaped().replace("is_tied=false", "is_tied=true")
    for more, words in (
        (("--set", tied, "--set", "stages=2", "--set", 'method={type="diloco", every=3}'), "tied"),
        (("--set", shaped(), "--set", "stages=5"), "of a model of 4 layers"),
        (("--set", shaped(8), "--set", "stages=6"), "6 among 4 peers"),
    ):
        answer = weft("plan", run_path, *FAST, *more)
        assert answer.code == 2
        assert words in answer.err
        assert answer.out == ""
