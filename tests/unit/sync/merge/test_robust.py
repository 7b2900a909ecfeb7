"""Rules against few who mean harm, compared with what their papers say, number by number."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weft.codec.config import Bf16Config, Fp32Config, TopKConfig
from weft.codec.dense import Fp32
from weft.config import from_tree
from weft.errors import ConfigError
from weft.run.config import RunFile
from weft.sync.merge.mean import Mean
from weft.sync.merge.reduce import GroupMean, Merger, coding_in, decode_parts, empty_mean, encode_parts
from weft.sync.merge.robust import lower_median
from weft.sync.method.choices import Choices, MultiKrumConfig, NesterovConfig, Rule, TrimmedMeanConfig
from weft.sync.method.presets import AsyncDiLoCoConfig, DdpConfig, DiLoCoConfig, SparseLoCoConfig, spell_out
from weft.sync.records.parts import cut

Vectors = NDArray[np.float64]  # a row for each contributor
RULES: list[Rule] = ["clipped_mean", "centered_clip", "median", TrimmedMeanConfig(), MultiKrumConfig()]
NAMES = [each if isinstance(each, str) else str(each.__struct_config__.tag) for each in RULES]
NUM = 40_000  # more than a piece


# --- the papers ---


def weighted(xs: Vectors, v: Vectors) -> Vectors:
    return (xs * v[:, None]).sum(0) / v.sum()


def median_of(values: Vectors, v: Vectors) -> float:
    """Return the lower weighted median."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(v[order])
    return float(values[order][np.argmax(2 * reached >= v.sum())])


def clipped(xs: Vectors, v: Vectors, most: float, growth: float) -> Vectors:
    lengths, units = np.linalg.norm(xs, axis=1), v**growth
    limits = most * median_of(lengths / units, v) * units
    return xs * np.minimum(1.0, limits / np.maximum(lengths, 1e-300))[:, None]


def trimmed(xs: Vectors, v: Vectors, f: int, growth: float) -> Vectors:
    """Yin et al., definition 2; of as many as there are, compared by token."""
    f = min(f, (len(xs) - 1) // 2)
    found = np.empty(xs.shape[1])
    for k in range(xs.shape[1]):
        kept = np.argsort(xs[:, k] / v**growth, kind="stable")[f : len(xs) - f]
        found[k] = (xs[kept, k] * v[kept]).sum() / v[kept].sum()
    return found


def centered(xs: Vectors, v: Vectors, growth: float) -> Vectors:
    """Karimireddy et al., algorithm 2, AGG: v <- v + mean of (x_i - v) min(1, tau / |x_i - v|)."""
    c = trimmed(xs, v, len(xs), growth)
    for _ in range(5):
        c = c + weighted(clipped(xs - c, v, 1.0, growth), v)
    return c


def multi_krum(xs: Vectors, v: Vectors, f: int, growth: float) -> Vectors:
    """Blanchard et al., section 4, with m = n - f; compared by token."""
    n, ys = len(xs), xs / v[:, None] ** growth
    f = max(0, min(f, (n - 3) // 2))
    scores = []
    for i in range(n):
        distances = sorted(float(((ys[i] - ys[j]) ** 2).sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: max(1, n - f - 2)]))
    kept = np.argsort(scores, kind="stable")[: n - f]
    return weighted(xs[kept], v[kept])


def reference(rule: Rule, xs: Vectors, v: Vectors, growth: float = 0.75) -> Vectors:
    match rule:
        case "clipped_mean":
            return weighted(clipped(xs, v, 1.5, growth), v)
        case "centered_clip":
            return centered(xs, v, growth)
        case "median":
            return trimmed(xs, v, len(xs), growth)
        case TrimmedMeanConfig(left_out=f):
            return trimmed(xs, v, f, growth)
        case MultiKrumConfig(left_out=f):
            return multi_krum(xs, v, f, growth)
    raise AssertionError(rule)


def merged(rule: Rule, xs: Vectors, v: Vectors, *, awaited: int = 0, is_of_steps: bool = True) -> Vectors:
    mean = empty_mean(rule, xs.shape[1], is_of_steps=is_of_steps)
    add_all(mean, xs, v)
    return mean.result(awaited).double().numpy()


def add_all(mean: Mean, xs: Vectors, v: Vectors) -> None:
    for weight, x in zip(v, xs, strict=True):
        mean.add(int(weight), torch.from_numpy(x).float())


def some(num_peers: int, num: int = NUM, seed: int = 0) -> tuple[Vectors, Vectors]:
    """Return deltas that have something in common, one of them far too long, and their tokens."""
    luck = np.random.default_rng(seed)
    common = luck.standard_normal(num)
    xs = common + luck.standard_normal((num_peers, num))
    xs[num_peers // 2] *= 7.0
    return xs.astype(np.float32).astype(np.float64), luck.integers(500, 2000, num_peers).astype(np.float64)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@pytest.mark.parametrize("num_peers", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("is_of_steps", [True, False])
def test_it_is_what_the_paper_says(rule: Rule, num_peers: int, is_of_steps: bool) -> None:
    xs, v = some(num_peers, 3000)
    expected = reference(rule, xs, v, 0.75 if is_of_steps else 0.0)
    np.testing.assert_allclose(merged(rule, xs, v, is_of_steps=is_of_steps), expected, rtol=2e-6, atol=1e-6)


MORE: list[Rule] = [TrimmedMeanConfig(left_out=2), TrimmedMeanConfig(left_out=9), MultiKrumConfig(left_out=3)]


@pytest.mark.parametrize("rule", MORE)
def test_as_many_are_left_out_as_asked_for_or_as_can_be(rule: Rule) -> None:
    xs, v = some(9, 500)
    np.testing.assert_allclose(merged(rule, xs, v), reference(rule, xs, v), rtol=2e-6, atol=1e-6)


def test_pieces_join_without_a_seam() -> None:
    xs, v = some(5)
    for rule in RULES:
        np.testing.assert_allclose(merged(rule, xs, v), reference(rule, xs, v), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_mean_of_equal_vectors_is_that_vector(rule: Rule) -> None:
    vector = torch.randn(NUM, generator=torch.Generator().manual_seed(0))
    mean = empty_mean(rule, NUM)
    for weight in (512,) * 4 if rule == "clipped_mean" else (512, 100, 1024, 7):  # of fewer tokens it is too long
        mean.add(weight, vector)
    assert mean.result().equal(vector)


def test_clipping_changes_no_bit_where_nobody_is_too_long() -> None:
    luck = np.random.default_rng(3)
    xs, v = luck.standard_normal((6, NUM)).astype(np.float32).astype(np.float64), np.full(6, 1024.0)
    for awaited in (0, 512):
        found, expected = (merged(rule, xs, v, awaited=awaited) for rule in ("clipped_mean", "peers_mean"))
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_late_make_room_for_themselves(rule: Rule) -> None:
    xs, v = some(5, 500)
    share = v.sum() / (v.sum() + 1234)
    np.testing.assert_allclose(merged(rule, xs, v, awaited=1234), share * merged(rule, xs, v), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_legacy_is_added_after_all_and_no_contributor(rule: Rule) -> None:
    xs, v = some(5, 500)
    legacy = np.full(500, 3.0)
    mean = empty_mean(rule, 500)
    add_all(mean, xs, v)
    mean.add_legacy(800, torch.from_numpy(legacy).float())
    expected = (reference(rule, xs, v) * v.sum() + 800 * legacy) / (v.sum() + 800)
    np.testing.assert_allclose(mean.result().double().numpy(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_who_weighs_nothing_changes_nothing(rule: Rule) -> None:
    xs, v = some(5, 500)
    mean = empty_mean(rule, 500)
    mean.add(0, torch.full((500,), 1e30))
    add_all(mean, xs, v)
    assert np.array_equal(mean.result().double().numpy(), merged(rule, xs, v))
    assert empty_mean(rule, 3).result().tolist() == [0.0] * 3


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_two_of_eight_do_not_move_it_far(rule: Rule) -> None:
    """Each attack moves the mean further from that of the honest than the rule, or as far where it is small."""
    luck = np.random.default_rng(5)
    common = luck.standard_normal(NUM)
    honest, v = (common + luck.standard_normal((6, NUM))).astype(np.float32), np.full(8, 1000.0)
    true = honest.mean(0)
    rule = TrimmedMeanConfig(left_out=2) if isinstance(rule, TrimmedMeanConfig) else rule
    rule = MultiKrumConfig(left_out=2) if isinstance(rule, MultiKrumConfig) else rule
    for attack in (-10 * true, 1e6 * luck.standard_normal(NUM), np.full(NUM, 1e30)):
        xs = np.concatenate([honest, np.tile(attack, (2, 1))]).astype(np.float32).astype(np.float64)
        off = np.linalg.norm(merged(rule, xs, v) - true) / np.linalg.norm(true)
        of_mean = np.linalg.norm(merged("peers_mean", xs, v) - true) / np.linalg.norm(true)
        assert off < 0.8 < of_mean


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_attacks_that_look_like_the_others_move_it_little(rule: Rule) -> None:
    """The inner product's (Xie et al., 1903.03936), no further than a mean. One within the spread of all (Baruch et
    al., 1902.06156), by less than itself: but a median and a trimmed mean further than a mean."""
    luck = np.random.default_rng(7)
    honest = (luck.standard_normal(NUM) + luck.standard_normal((6, NUM))).astype(np.float32)
    true, spread, v = honest.mean(0), 1.5 * honest.std(0), np.full(8, 1000.0)

    def off(rule: Rule, attack: NDArray[np.float32]) -> float:
        xs = np.concatenate([honest, np.tile(attack, (2, 1))]).astype(np.float32).astype(np.float64)
        return float(np.linalg.norm(merged(rule, xs, v) - true))

    assert 0 < off(rule, -0.5 * true) < 1.1 * off("peers_mean", -0.5 * true)
    assert 0 < off(rule, true - spread) < 0.5 * np.linalg.norm(spread)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_who_has_more_tokens_and_so_a_longer_delta_is_no_outlier(rule: Rule) -> None:
    luck, v = np.random.default_rng(6), np.array([1000.0] * 4 + [4000.0])
    common = luck.standard_normal(NUM)
    xs = ((common + 0.1 * luck.standard_normal((5, NUM))) * v[:, None] ** 0.75).astype(np.float32).astype(np.float64)
    with_it, without = merged(rule, xs, v), merged(rule, xs[:4], v[:4])
    assert np.linalg.norm(with_it) > 1.2 * np.linalg.norm(without)


def test_what_a_group_brings_is_compared_by_the_tokens_of_one() -> None:
    """Two groups of ten and two lone members, all honest: the mean of ten is no longer than what one brings."""
    luck = np.random.default_rng(7)
    xs = luck.standard_normal((4, 500)).astype(np.float32)
    mean, single, plain = (
        empty_mean("clipped_mean", 500),
        empty_mean("clipped_mean", 500),
        empty_mean("peers_mean", 500),
    )
    for x, num_peers in zip(xs, (10, 10, 1, 1), strict=True):
        vector = torch.from_numpy(x)
        mean.add(1000 * num_peers, vector, num_peers)
        single.add(1000 * num_peers, vector)
        plain.add(1000 * num_peers, vector)
    assert mean.result().equal(plain.result())
    assert not single.result().equal(plain.result())


def test_the_lower_median_is_by_weight() -> None:
    assert lower_median([3.0, 1.0, 2.0], [1, 1, 1]) == 2.0
    assert lower_median([1.0, 2.0], [1, 1]) == 1.0
    assert lower_median([1.0, 2.0, 9.0], [1, 1, 5]) == 9.0


def test_owners_and_groups_merge_by_the_rule_of_the_run() -> None:
    choices = spell_out(DiLoCoConfig(codec=Fp32Config(), merge="median"), 4)
    xs, v = some(4, 5000)
    merger = Merger(5000, coding_in(choices, 1))
    parts = cut(5000, [1, 2])
    group = GroupMean(Fp32(), parts, choices.merge)
    for weight, x in zip(v, xs, strict=True):
        vector = torch.from_numpy(x).float()
        merger.add(int(weight), Fp32().encode(vector))
        group.add(int(weight), encode_parts(Fp32(), vector, parts))
    expected = torch.from_numpy(merged("median", xs, v)).float()
    assert merger.merged().equal(expected)
    assert decode_parts(Fp32(), [part.encoded for part in group.result(Fp32())], parts).equal(expected)
    gradients = spell_out(DdpConfig(merge="clipped_mean"), 4)
    assert not coding_in(gradients, 1).is_of_steps


def test_what_a_rule_cannot_compare_is_refused() -> None:
    def custom(**fields: Any) -> Choices:
        usual: dict[str, Any] = {"every": 10, "send": "delta", "apply": NesterovConfig(), "codec": Bf16Config()}
        return Choices(**(usual | fields))

    for rule in RULES:
        assert custom(merge=rule).merge == rule
        with pytest.raises(ConfigError, match="wait for nobody"):
            custom(merge=rule, wait="ready")
    for rule in ("median", "centered_clip", TrimmedMeanConfig(), MultiKrumConfig()):
        with pytest.raises(ConfigError, match="a few other numbers"):
            custom(merge=rule, codec=TopKConfig(), reply_codec=Bf16Config(), feedback=0.95)
    assert custom(merge="clipped_mean", codec=TopKConfig(), reply_codec=Bf16Config(), feedback=0.95)
    assert spell_out(SparseLoCoConfig(merge="clipped_mean"), 4).merge == "clipped_mean"
    assert spell_out(AsyncDiLoCoConfig(), 4).merge == "peers_mean"


def test_a_run_file_names_a_rule() -> None:
    tree: dict[str, Any] = {"name": "a", "peers": 5, "train": {"tokens": 1000, "schedule": {"type": "constant"}}}
    table = {"type": "trimmed_mean", "left_out": 2}
    for given, expected in (("median", "median"), (table, TrimmedMeanConfig(left_out=2))):
        read = from_tree(tree | {"method": {"type": "diloco", "merge": given}}, RunFile, where="run.toml")
        assert spell_out(read.method, 4).merge == expected
    with pytest.raises(ConfigError, match="merge"):
        from_tree(tree | {"method": {"type": "diloco", "merge": "mode"}}, RunFile, where="run.toml")
    for rule, needed in (("median", 3), ({"type": "trimmed_mean", "left_out": 2}, 5), ({"type": "multi_krum"}, 5)):
        few = tree | {"method": {"type": "diloco", "merge": rule}, "peers": needed - 1}
        with pytest.raises(ConfigError, match=f"needs {needed} peers or more"):
            from_tree(few, RunFile, where="run.toml")
        from_tree(few | {"peers": needed}, RunFile, where="run.toml")
