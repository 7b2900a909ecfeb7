"""What the benchmark of experts says of its figures: errors by document, shares of the one model's gain, the best."""

import json
from math import isnan, sqrt
from pathlib import Path

import pytest
from benchmarks import experts
from benchmarks.experts import BAR, REFERENCE, START, TOLD_THE_KIND, Found, gained, losses_in, oracle, paired, share_of

DOCUMENTS = ["python.1", "python.1", "python.2", "manuals.1", "manuals.1", "manuals.2"]
EASY = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # of windows: how much harder each is, whoever reads it


def found(seed: int = 1, **losses: float | list[float]) -> Found:
    """Return a seed in which the seed model has 3 nats and the one model 2, beside what is named."""
    rows: dict[str, float | list[float]] = {
        REFERENCE: 2.0,
        START: 3.0,
        "expert 0": 2.5,
        "expert 1": 2.6,
        "ensemble, uniform": 2.3,
        TOLD_THE_KIND: 1.5,
        "soup, uniform": 2.8,
        "mixture, thawed": 2.4,
    }
    rows |= {name.replace("_", ", "): value for name, value in losses.items()}
    of = {
        name: value if isinstance(value, list) else [value + seed / 10 + each for each in EASY]
        for name, value in rows.items()
    }
    costs = dict.fromkeys(of, (10.0, 1.0))
    return Found(
        seed=seed,
        scale=1.0,
        documents=DOCUMENTS,
        losses=of,
        costs=costs,
        clusters=[{"python": 10}, {"manuals": 20}],
        taken=["expert 0"],
    )


def test_windows_of_one_document_count_as_one() -> None:
    gap, error = paired(["a", "a", "a", "b"], [1.0, 1.0, 1.0, 3.0])
    assert gap == pytest.approx(2.0)
    assert error == pytest.approx(sqrt(2) / sqrt(2))
    assert isnan(paired(["a", "a"], [1.0, 2.0])[1])


def test_a_share_of_the_gain_is_one_for_who_gains_as_much_and_none_for_who_gains_nothing() -> None:
    whole = [1.0, 2.0, 3.0]
    assert share_of(["a", "b", "c"], whole, whole) == pytest.approx((1.0, 0.0))
    assert share_of(["a", "b", "c"], [0.0] * 3, whole).mean == 0.0
    assert share_of(["a", "b", "c"], [0.5, 1.0, 1.5], whole) == pytest.approx((0.5, 0.0))


def test_the_error_of_a_share_is_that_of_documents_beside_each_other() -> None:
    # residuals of a share of 1: -0.5, 0.5; their mean's error 0.5, by a whole gain of 2
    share = share_of(["a", "a", "b"], [0.5, 0.5, 3.5], [1.0, 1.0, 3.0])
    assert share == pytest.approx((1.0, 0.25))


def test_nobody_has_a_share_of_no_gain() -> None:
    share = share_of(["a", "b"], [1.0, 1.0], [0.5, -0.5])
    assert isnan(share.mean)
    assert str(share) == "-"
    assert str(share_of(["a"], [1.0], [2.0])) == "0.500"  # of one document no error is known


def test_a_share_is_told_of_all_seeds_and_of_a_kind() -> None:
    half = [2.5, 2.6, 2.7, 3.3, 3.4, 3.5]  # half the gain of python, none of manuals
    both = [found(1, ensemble_uniform=[each + 0.1 for each in half]), found(2, ensemble_uniform=2.0)]
    assert gained(both[:1], losses_in("ensemble, uniform")).mean == pytest.approx(0.25)
    assert gained(both[:1], losses_in("ensemble, uniform"), "python").mean == pytest.approx(0.5)
    assert gained(both[1:], losses_in("ensemble, uniform")).mean == pytest.approx(1.0)
    assert gained(both, losses_in("ensemble, uniform"), "manuals").mean == pytest.approx(0.5)


def test_the_oracle_takes_one_expert_for_all_of_a_document() -> None:
    rows = found()
    rows.losses["expert 0"] = [1.0, 3.0, 9.0, 1.0, 1.0, 1.0]
    rows.losses["expert 1"] = [2.5, 2.5, 2.0, 5.0, 5.0, 5.0]
    assert oracle(rows) == [1.0, 3.0, 2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("loss", "word"), [(3.0 - BAR - 0.001, "reaches"), (3.0 - BAR + 0.001, "**misses**")])
def test_the_best_row_is_named_and_whether_it_comes_as_far_as_it_should(loss: float, word: str) -> None:
    _, said = experts.shares([found(1, mixture_thawed=loss), found(2, mixture_thawed=loss)])
    assert "of 3 composed rows" in said
    assert f"mixture, thawed, {3.0 - loss:.3f} ± 0.000 of the one model's gain" in said
    assert f"It {word} 0.97." in said


def test_a_row_that_is_told_the_kind_is_not_the_best() -> None:
    table, said = experts.shares([found()])
    assert table.splitlines()[2].startswith(f"| {TOLD_THE_KIND} | 1.500")
    assert "ensemble, uniform, 0.700" in said


def test_a_bar_within_two_errors_is_not_decided() -> None:
    losses = [2.0, 2.1, 2.0, 2.6, 2.6, 2.7]
    assert "is not decided" in experts.shares([found(ensemble_uniform=losses)])[1]


def test_the_report_tells_every_row_and_share() -> None:
    both = [found(1), found(2)]
    whole = "\n".join(experts.sections_of(both, None))
    for name in both[0].losses:
        assert f"| {name} |" in whole
    assert "| soup, uniform | 0.200 ± 0.000 | 0.200 ± 0.000 | 0.200 ± 0.000 |" in whole
    assert "no text of these kinds: licences, settings" in whole


def test_a_seed_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    experts.keep(file, [found(1), found(2)])
    one, two = file.read_text().splitlines()
    file.write_text(f"{one}\n{two[:50]}")
    assert [each.seed for each in experts.known(file)] == [1]
    assert json.loads(one)["seed"] == 1
