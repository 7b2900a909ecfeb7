"""A play of serving: texts come whole whoever dies, who is slow or far gets less, and equal files give equal plays."""

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.rig.routes import Blind, Oracle

from weft.engine.draw import Drawn
from weft.sim.scenario import Line, Lined, Slow, Stop
from weft.sim.serving.machines import Agreed, TimedSection
from weft.sim.serving.play import Served, Stage, play
from weft.sim.serving.scenario import Churn, Server, ServingScenario, Texts

TEXTS = Texts(count=8, per_s=4.0, prompt_tokens=8, answer_tokens=6, row_nbytes=64)
HOME = Server(name="home", count=4, step_ms=10.0, row_ms=2.0, token_ms=0.5)


def described(**changes: Any) -> ServingScenario:
    usual: dict[str, Any] = {"stages": 2, "seed": 3, "texts": TEXTS, "kind": (HOME,)}
    return ServingScenario(**usual | changes)


def tokens_of(served: Served, name: str) -> int:
    return sum(each.num_tokens for each in served.machines if each.name.startswith(name))


def test_equal_scenarios_give_equal_plays() -> None:
    lines: list[list[bytes]] = [[], []]
    churn = Churn(every_s=0.5, returns_after_s=1.0)
    once, again = (play(described(churn=churn), told.append) for told in lines)
    assert once == again
    assert lines[0] == lines[1]
    assert once.gap is not None
    assert play(described(churn=churn, seed=4)).gap != once.gap


def test_texts_are_whole_though_machines_die_under_them() -> None:
    texts = Texts(count=10, per_s=4.0, prompt_tokens=8, answer_tokens=24, row_nbytes=64)
    kind = Server(name="home", count=8, step_ms=10.0, row_ms=2.0)
    served = play(described(texts=texts, kind=(kind,), churn=Churn(every_s=0.3, killed=1.0, returns_after_s=1.0)))
    assert (served.num_done, served.broken) == (10, ())
    assert served.num_mended > 0
    assert served.num_moved > 0


def test_who_asks_waits_for_as_long_as_tokens_take() -> None:
    """Once members have told how slow they are, no text is asked for again where nobody fails."""
    texts = Texts(count=16, per_s=1.0, prompt_tokens=8, answer_tokens=6, row_nbytes=64)
    served = play(described(texts=texts, kind=(Server(name="home", count=4, step_ms=300.0),)))
    assert served.num_done == texts.count
    assert served.num_mended < texts.count / 3


def test_a_token_that_was_not_agreed_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Agreed.token

    def other(seed: bytes, place: int) -> int:
        return right(seed, place + 1)

    def drawn(section: TimedSection, work: Any) -> Any:
        done = usual(section, work)
        if work.draw is None or not section.is_last:
            return done
        seed = work.draw.drawing.seed
        return type(done)(drawn=tuple(Drawn(other(seed, place)) for place in work.drawn_places))

    usual = TimedSection._done
    monkeypatch.setattr(TimedSection, "_done", drawn)
    served = play(described())
    assert (served.num_done, served.num_wrong) == (0, TEXTS.count)


def test_who_is_slow_gets_less() -> None:
    slow = Server(name="slow", step_ms=60.0, row_ms=12.0, token_ms=3.0)
    fast = Server(name="fast", step_ms=10.0, row_ms=2.0, token_ms=0.5)
    texts = Texts(count=48, per_s=8.0, prompt_tokens=8, answer_tokens=12, row_nbytes=64)  # members tell every 2 s
    served = play(described(stages=1, texts=texts, kind=(slow, fast)))
    assert served.num_done == 48
    assert tokens_of(served, "fast") > 2 * tokens_of(served, "slow")


def test_who_becomes_slow_gets_less() -> None:
    """A member's own steps tell it, whatever it was like before: after some tens of them."""
    texts = Texts(count=96, per_s=6.0, prompt_tokens=8, answer_tokens=12, row_nbytes=64)
    kind = Server(name="home", count=2)
    slow = Slow(peer="home-0", at_s=0.1, factor=0.1, lasts_s=600.0)
    alike, unlike = (play(described(stages=1, texts=texts, kind=(kind,), fault=each)) for each in ((), (slow,)))
    assert tokens_of(unlike, "home-0") < 0.7 * tokens_of(alike, "home-0")


def test_who_is_far_gets_less() -> None:
    kinds = (
        Server(name="first", stage=1),
        Server(name="far", stage=2, delay_ms=150.0),
        Server(name="near", stage=2, delay_ms=5.0),
    )
    served = play(described(kind=kinds))
    assert served.num_done == TEXTS.count
    assert tokens_of(served, "near") > 2 * tokens_of(served, "far")


def test_a_line_that_gets_worse_is_felt() -> None:
    worse = Line(peer="home", at_s=0.0, delay_ms=200.0, lasts_s=600.0)
    usual, late = play(described()).gap, play(described(fault=(worse,))).gap
    assert usual is not None
    assert late is not None
    assert late.p50 > usual.p50 + 500.0  # a ring of two is 2 x 2 x 190 ms longer


def test_texts_of_a_stage_that_all_have_left_end_with_an_error() -> None:
    kinds = (Server(name="first", stage=1), Server(name="second", stage=2))
    served = play(described(kind=kinds, fault=(Stop(peer="second", at_s=0.6),)))
    assert served.num_failed > 0
    assert served.num_done + served.num_failed == TEXTS.count
    assert all("Nobody serves stage 2 of 2" in why for why in served.failures)
    assert [each.name for each in served.machines if not each.is_there] == ["second"]


def test_what_does_not_come_about_is_told() -> None:
    never = Stop(peer="home-1", at_s=5000.0)
    assert play(described(fault=(never,))).unplayed == (never,)


def test_texts_that_the_limit_ends_are_told() -> None:
    served = play(described(limit_s=0.5))
    assert served.num_unended > 0
    assert served.took_s == pytest.approx(0.5)


@pytest.mark.full
def test_who_does_not_look_at_load_makes_everybody_wait() -> None:
    texts = Texts(count=60, per_s=12.0, prompt_tokens=16, answer_tokens=16, row_nbytes=64)
    kind = Server(name="home", count=8, step_ms=20.0, row_ms=10.0, token_ms=1.0, spread=0.1)
    makes: list[Callable[[Stage], Any] | None] = [None, Oracle, lambda stage: Blind(stage.scenario.stages)]
    routed, oracle, blind = (
        play(described(texts=texts, kind=(kind,), entry=(Lined(name="entry", count=2),)), make_paths=make).gap
        for make in makes
    )
    assert routed is not None
    assert oracle is not None
    assert blind is not None
    assert blind.p95 > 1.5 * routed.p95
    assert routed.p95 < 1.5 * oracle.p95
