"""What a member says of itself, and what it may be put together with."""

import msgspec
import pytest

from weft.compose.member import Member, Origin, TextOf, flops_together, overlap, require_one_parent
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import named

A, B = Digest("aa" * 32), Digest("bb" * 32)


def member(name: str, **changes: object) -> Member:
    made = Member(name=name, model=named("nano", 257, 64), weights=A, tokenizer=A, parent=A)
    return msgspec.structs.replace(made, **changes)  # type: ignore[arg-type]


def test_the_overlap_of_texts_is_a_share_of_tokens() -> None:
    one = member("one", texts=(TextOf(digest=A, num_tokens=30), TextOf(digest=B, num_tokens=10)))
    other = member("other", texts=(TextOf(digest=B, num_tokens=10),))
    assert overlap(one, other) == 0.25
    assert overlap(other, one) == 1.0
    assert overlap(one, member("silent")) is None


def test_weights_are_averaged_of_members_that_began_alike_alone() -> None:
    require_one_parent([member("one"), member("two", weights=B)])
    for changes in ({"parent": B}, {"parent": None}, {"model": named("tiny", 257, 64)}):
        with pytest.raises(ConfigError, match="one and two cannot be averaged"):
            require_one_parent([member("one"), member("two", **changes)])


def test_what_it_took_is_the_sum_of_all_that_was_done() -> None:
    made = member(
        "made", origins=(Origin(how="trained", tokens=5, flops=50), Origin(how="one-way", of=(B,), tokens=2, flops=7))
    )
    assert (made.tokens, made.flops) == (7, 57)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Member) == made


def test_what_several_members_began_with_is_counted_once() -> None:
    seed = Origin(how="trained", tokens=5, flops=50, made=A)
    one, other = (
        member(name, origins=(seed, Origin(how="trained", tokens=num, flops=10 * num, made=Digest(digits * 32))))
        for name, num, digits in (("one", 1, "01"), ("other", 2, "02"))
    )
    soup = member("soup", origins=(*one.origins, *other.origins, Origin(how="soup", of=(A, B))))
    assert flops_together([one, other]) == 50 + 10 + 20
    assert (soup.tokens, soup.flops) == (8, 80)
    unnamed = member("old", origins=(Origin(how="trained", tokens=1, flops=7),))
    assert flops_together([unnamed, unnamed]) == 14
    assert flops_together([one, member("silent")]) is None
    trained = one.trained_on("more", one.model, B, Origin(how="continued", flops=3))
    assert (trained.origins[-1].made, trained.flops) == (B, 63)
