"""From a plan to its points: grids, what rows may change, and what a point is called."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from unit.sim.plans import PLAN, ROW, read, write
from weft.bench.plan import MAX_POINTS, TUNED, Bench, Point, config_of, name_of, names_of
from weft.config import load_tree
from weft.errors import ConfigError
from weft.run.config import RunConfig
from weft.run.genesis import seal
from weft.store.home import Home
from weft.sync.method.choices import Choices
from weft.sync.method.schedule import CosineConfig, WsdConfig

COSINE = 'type = "cosine"\ntotal_tokens = 320'

LATE = '[[kind]]\nname = "late"\njoins_at_s = 1e6\n'


def sealed(points: Sequence[Point], folder: Path) -> dict[int, RunConfig]:
    return {
        point.seed: seal(point.run_file, folder, Home(folder / "home"), lambda _event: None).config for point in points
    }


def names(path: Path) -> dict[str, Point]:
    bench, points = read(path)
    return names_of(points, bench, sealed(points, path.parent))


def test_a_table_of_a_grid_is_all_combinations_and_tables_add_up(tmp_path: Path) -> None:
    grid = 'grid = [{ "method.every" = [1, 2], "train.clip" = [1.0, 2.0] }, { "method.every" = [4] }]\n'
    _, points = read(write(tmp_path, PLAN + ROW + grid))
    found = [point.values for point in points if point.row == "another"]
    assert found == [
        {"method.every": 1, "train.clip": 1.0},
        {"method.every": 1, "train.clip": 2.0},
        {"method.every": 2, "train.clip": 1.0},
        {"method.every": 2, "train.clip": 2.0},
        {"method.every": 4},
    ]


def test_a_point_is_the_run_of_its_row_with_what_its_grid_sets(tmp_path: Path) -> None:
    more = 'set = { "train.optimizer" = { type = "muon" }, "train.clip" = 3.0 }\n'
    bench, points = read(write(tmp_path, PLAN + ROW + more))
    config = config_of(points[-1], sealed(points, tmp_path)[0])
    assert (config.method.every, config.train.clip) == (2, 3.0)
    assert config.train.optimizer.__struct_config__.tag == "muon"
    assert isinstance(config.method, Choices)
    assert config.has_even_leases
    first = config_of(points[0], sealed(points, tmp_path)[0])
    assert (first.data, first.model, first.initial) == (config.data, config.model, config.initial)
    assert config == seal(points[-1].run_file, tmp_path, Home(tmp_path / "home"), lambda _event: None).config
    assert bench.num_peers == points[0].run_file.peers == 2


def test_a_whole_schedule_of_a_row_has_the_plans_warmup_and_length(tmp_path: Path) -> None:
    more = 'set = { "train.schedule" = { type = "wsd", lr = 1e-3, decay_tokens = 10 } }\n'
    path = write(tmp_path, PLAN + ROW + more)
    run = tmp_path / "run.toml"
    run.write_text(run.read_text().replace('type = "constant"', COSINE))
    _, points = read(path)
    plain, own = (point.run_file.train.schedule for point in (points[0], points[-1]))
    assert isinstance(plain, CosineConfig)
    assert isinstance(own, WsdConfig)
    assert (own.warmup_tokens, own.total_tokens) == (plain.warmup_tokens, plain.total_tokens)
    assert own.warmup_tokens > 0


def test_every_seed_and_length_is_a_point_and_rows_may_have_their_own(tmp_path: Path) -> None:
    plan = PLAN.replace("steps = [4]", "steps = [4, 8]\nseeds = [0, 1]")
    _, points = read(write(tmp_path, plan + ROW + "steps = [12]\nseeds = [7]\n"))
    assert [(point.steps, point.seed) for point in points if point.row == "ddp"] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    assert [(point.steps, point.seed) for point in points if point.row == "another"] == [(12, 7)]
    assert points[-1].run_file.seed == 7


def test_a_length_may_be_told_in_tokens_of_all(tmp_path: Path) -> None:
    _, points = read(write(tmp_path, PLAN.replace("steps = [4]", "tokens = [512]")))
    assert {(point.steps, point.run_file.train.tokens) for point in points} == {(8, 512)}  # 2 peers of 2 x 16 a step


def test_the_schedule_covers_the_run(tmp_path: Path) -> None:
    path = write(tmp_path, PLAN.replace("steps = [4]", "steps = [40]\nwarmup = 0.1"))
    run = path.with_name("run.toml")
    run.write_text(run.read_text().replace('type = "constant"', COSINE))
    _, points = read(path)
    schedule = points[0].run_file.train.schedule
    assert isinstance(schedule, CosineConfig)
    assert (schedule.warmup_tokens, schedule.total_tokens) == (256, 2560)


@pytest.mark.parametrize(
    "field", ["data.heldout_fraction", "train.batch_size", "train.tokens", "seed", "train.clipped"]
)
def test_a_row_that_would_train_on_something_else_is_refused(tmp_path: Path, field: str) -> None:
    for how in (f'set = {{ "{field}" = 1 }}', f'grid = [{{ "{field}" = [1] }}]'):
        with pytest.raises(ConfigError, match=f"row another: {field} is equal for all rows"):
            read(write(tmp_path, f"{PLAN}{ROW}{how}\n"))
    assert "method" in TUNED


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (PLAN + ROW + f'grid = [{{ "method.every" = {[1] * (MAX_POINTS + 1)} }}]\n', "row another: a grid of 7 points"),
        (PLAN + ROW + 'grid = [{ "method.every" = [] }]\n', "row another: a grid of 0 points"),
        (PLAN + ROW.replace("another", "ddp"), "two rows are called ddp"),
        (PLAN.replace("steps = [4]", ""), "either steps, of each peer, or tokens"),
        (PLAN.replace("steps = [4]", "steps = [4]\ntokens = [512]"), "either steps, of each peer, or tokens"),
        (
            PLAN.replace("steps = [4]", "tokens = [500]"),
            "500 are no whole number of training steps; one of all peers takes 64",
        ),
        (
            PLAN + ROW.replace("every = 2", "every = 3"),
            "row another: 4 training steps are not a whole number of rounds of 3",
        ),
        (PLAN + ROW.replace("every = 2", "evry = 2"), 'row another: .method. has no field "evry"'),
        (PLAN + ROW + 'grid = [{ "method.every" = ["x"] }]\n', 'row another: method.every is "x"'),
        (PLAN.replace("count = 2", "cuont = 2"), "cuont"),
        (
            PLAN.replace("count = 2", "count = 2\njoins_at_s = 1.0"),
            "the first peer makes the run, so its joins_at_s is 0",
        ),
        (PLAN.replace("[[row]]", LATE + "[[row]]", 1), "kind late: all machines of a plan are there from the start"),
        (PLAN.replace("[[row]]", '[[kind]]\nname = "peer-1"\n[[row]]', 1), "two machines are called peer-1"),
    ],
)
def test_a_plan_that_cannot_be_run_says_why(tmp_path: Path, plan: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(write(tmp_path, plan))


def test_a_run_of_private_data_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    run = path.with_name("run.toml")
    run.write_text("is_private = true\n" + run.read_text())
    with pytest.raises(ConfigError, match="share their data"):
        read(path)


def test_equal_points_of_two_rows_are_refused(tmp_path: Path) -> None:
    again = '[[row]]\nname = "again"\nmethod = { type = "diloco", every = 4, lr = 0.7, momentum = 0.2 }\n'
    with pytest.raises(ConfigError, match=r"row again: with nothing it is the same run as row diloco with .*:4"):
        names(write(tmp_path, PLAN + again))


def test_a_name_follows_from_all_that_the_outcome_follows_from_and_from_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path)
    usual = list(names(path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert list(names(write(elsewhere, PLAN.replace('"ddp"\nmethod', '"plain"\nmethod')))) == usual
    assert len(set(usual)) == 3
    for changed in (
        PLAN.replace("up_mbit = 20.0", "up_mbit = 5.0"),
        PLAN.replace("steps = [4]", "steps = [8]"),
        PLAN.replace("steps = [4]", "steps = [4]\nseeds = [1]"),
        PLAN.replace("count = 2", "count = 3"),
    ):
        assert not set(names(write(elsewhere, changed))) & set(usual)
    write(elsewhere)
    (elsewhere / "text.txt").write_text("another text\n" * 400)
    assert not set(names(elsewhere / "plan.toml")) & set(usual)


def test_settings_of_one_row_change_the_names_of_that_row_alone(tmp_path: Path) -> None:
    usual = names(write(tmp_path))
    other = names(write(tmp_path, PLAN.replace("momentum = 0.2", "momentum = 0.3")))
    assert {usual[name].row for name in set(usual) - set(other)} == {"diloco"}
    assert {other[name].row for name in set(usual) & set(other)} == {"ddp"}


def test_a_name_is_of_the_config_not_of_how_it_was_said(tmp_path: Path) -> None:
    bench, points = read(write(tmp_path))
    runs = sealed(points, tmp_path)
    spelled = msgspec.structs.replace(points[1].run_file, method=config_of(points[1], runs[0]).method)
    said_otherwise = Point("x", {"y": 1}, points[1].seed, points[1].steps, spelled)
    assert name_of(said_otherwise, bench, runs[0]) == name_of(points[1], bench, runs[0])


def test_the_plans_to_start_from_are_plans() -> None:
    folder = Path(__file__).parents[3] / "recipes" / "bench"
    rows = {}
    for path in (path for path in sorted(folder.glob("*.toml")) if "row" in load_tree(path)):
        bench, points = read(path)
        rows[path.stem] = [row.name for row in bench.row]
        assert isinstance(bench, Bench)
        assert len(points) >= len(bench.row)
    assert rows["methods"][0] == "ddp"
    assert set(rows["methods"]) <= set(rows["library"])
    assert rows["alone"] == ["AdamW", "Muon"]
