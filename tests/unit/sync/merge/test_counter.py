"""What a round has counted of a false work, taken out of the mean of another: to the bit, however both are cut."""

import pytest
import torch
from msgspec.structs import replace

from model.world import first_base
from weft.codec import bounds
from weft.codec.config import Fp32Config, Int8Config, TopKConfig
from weft.errors import PayloadError
from weft.ids import Attempt, Digest, PeerId, Round, Tokens
from weft.sync.merge.counter import Piece, pieces, take_out, wanted
from weft.sync.merge.reduce import Coding, EncodedPart, Merger, coding_in, encode_parts, named
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.records.acts import Weighed
from weft.sync.records.messages import Counted, Manifest, PartResult, payload_of
from weft.sync.records.parts import ALIGNMENT, cut
from weft.wire import Buffer, digest, digest_of

A, B, C = (PeerId(f"{number:064x}") for number in range(3))
WEIGHTS, LATE = {A: 5, B: 0, C: 11}, 3
NUM = 5 * ALIGNMENT // 2
PLAIN = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0), codec=Fp32Config())


class Round4:
    """A round among three, one of whom brings a false work and owns the last part."""

    def __init__(self, choices: Choices = PLAIN, false: PeerId = C) -> None:
        self.choices, self.uplinks = choices, (16, 4, 16)
        self.ranges = cut(NUM, self.uplinks)
        made = torch.Generator().manual_seed(1)
        self.vectors = {peer: torch.randn(NUM, generator=made) for peer in WEIGHTS}
        self.coding: Coding = coding_in(choices, 4)
        self.encoded = {peer: encode_parts(self.coding.codec, each, self.ranges) for peer, each in self.vectors.items()}
        self.parts = {peer: tuple(map(digest, each)) for peer, each in self.encoded.items()}
        self.brought: dict[Digest, Buffer] = {digest(data): data for each in self.encoded.values() for data in each}
        results = tuple(self._merged(part) for part in range(3))
        self.brought |= {each.digest: each.encoded for each in results}
        base = first_base(3)
        self.manifest = Manifest(
            run=base.run,
            branch=base.branch,
            round=Round(4),
            attempt=Attempt(0),
            leader=A,
            previous=base.previous,
            contributions=tuple(
                Counted(peer=p, tokens=Tokens(w), payload=payload_of(self.parts[p])) for p, w in WEIGHTS.items()
            ),
            parts=tuple(
                PartResult(owner=owner, result=each.digest, uplink=uplink)
                for owner, each, uplink in zip((A, B, C), results, self.uplinks, strict=True)
            ),
            members=(A, B, C),
            uplinks=(16, 16, 16),
            joined=(),
            left=(),
            leases=(),
            cursor=0,
            committed_tokens=Tokens(0),
            acts=(),
            charter=digest(b"charter"),
        )
        self.weighed = Weighed(
            branch=base.branch,
            manifest=digest_of(self.manifest),
            weights=tuple(WEIGHTS.values()),
            late=LATE,
            method=digest_of(choices),
        )

    def _merged(self, part: int) -> EncodedPart:
        merger = Merger(len(self.ranges[part]), self.coding, LATE)
        for peer, weight in WEIGHTS.items():
            merger.add(weight, self.encoded[peer][part])
        return merger.result()

    def pieces(self, here: range) -> tuple[Piece, ...]:
        return pieces(C, self.weighed, self.manifest, self.parts, self.choices, NUM, here)

    def without(self, mean: torch.Tensor, uplinks: tuple[int, ...]) -> torch.Tensor:
        """Return a mean less the false work, by owners of parts that are cut so."""
        found = mean.clone()
        for here in cut(NUM, uplinks):
            take_out(found[here.start : here.stop], here, self.pieces(here), self.brought, bounds.empty)
        return found


def test_what_is_taken_out_is_what_the_round_has_moved_by_it() -> None:
    was, mean = Round4(), torch.randn(NUM, generator=torch.Generator().manual_seed(2))
    moved = (mean - was.without(mean, (1,))).double()
    assert torch.allclose(moved, 11 / 19 * was.vectors[C].double(), rtol=0, atol=1e-6)


def test_it_is_the_same_to_the_bit_however_the_later_round_is_cut() -> None:
    was, mean = Round4(), torch.randn(NUM, generator=torch.Generator().manual_seed(2))
    whole = was.without(mean, (1,))
    assert all(was.without(mean, uplinks).equal(whole) for uplinks in [(1, 1), (4, 16, 8, 2), (0, 3, 1)])


def test_of_parts_that_others_have_merged_it_is_one_product_and_one_difference() -> None:
    was, mean = Round4(), torch.randn(NUM, generator=torch.Generator().manual_seed(2))
    here = was.ranges[0]
    exact = (mean.double() - was.vectors[C].double() * (11 / 19)).float()
    found = was.without(mean, (1,))
    assert found[here.start : here.stop].equal(exact[here.start : here.stop])


def test_its_own_part_takes_nothing_that_it_alone_has() -> None:
    """What it has brought to that, it need not show: there it is what it says that all came to, less the others'."""
    was = Round4()
    here = was.ranges[2]
    (piece,) = was.pieces(here)
    assert {term.digest for term in piece.terms} == {was.manifest.parts[2].result, was.parts[A][2]}
    assert was.parts[C][2] not in {term.digest for term, _ in wanted(was.pieces(range(NUM)))}
    lie = named(was.coding.reply.encode(torch.full((len(here),), 7.0)))  # what it has merged is what all have moved by
    false = replace(was.manifest.parts[2], result=lie.digest)
    was.manifest = replace(was.manifest, parts=(*was.manifest.parts[:2], false))
    was.brought[lie.digest] = lie.encoded
    mean = torch.zeros(NUM)
    left = was.without(mean, (1,))[here.start : here.stop]
    honest = was.vectors[A][here.start : here.stop].double() * (5 / 19)
    assert torch.allclose(left.double(), honest - 7.0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", [Int8Config(), TopKConfig()], ids=lambda each: type(each).__name__)
def test_what_was_decoded_is_taken_out_by_codecs_that_leave_something(codec: Int8Config | TopKConfig) -> None:
    choices = replace(PLAIN, codec=codec, reply_codec=Fp32Config(), feedback=0.95)
    was, mean = Round4(choices), torch.zeros(NUM)
    decoded = torch.cat(
        [
            torch.empty(len(here)).copy_(_decoded(was, here, data))
            for here, data in zip(was.ranges, was.encoded[C], strict=True)
        ]
    )
    found = was.without(mean, (2, 3))
    assert torch.allclose(found, -(decoded * (11 / 19)), rtol=0, atol=1e-5)


def _decoded(was: Round4, here: range, data: Buffer) -> torch.Tensor:
    out = torch.empty(len(here))
    was.coding.codec.decode(data, len(here), out)
    return out


def test_what_is_missing_or_no_payload_is_said() -> None:
    was, here = Round4(), range(NUM)
    for broken in (was.parts[C][0], was.manifest.parts[2].result):
        for data in (None, b"none"):
            brought = {**was.brought, broken: data} if data else {k: v for k, v in was.brought.items() if k != broken}
            with pytest.raises(PayloadError):
                take_out(torch.zeros(NUM), here, was.pieces(here), brought, bounds.empty)
