"""What benchmarks measure is still there: members that average as a run's do, functions where a profile looks."""

import asyncio
from pathlib import Path

import torch
from benchmarks._member import averaging, swarm
from benchmarks.rounds import WHERE

from weft.codec.config import Fp32Config

DEADLINE_S = 60.0
NUM, ROUNDS = 1000, 3
SOURCE = Path(__file__).parents[2] / "src"


async def test_members_of_a_benchmark_average_round_after_round() -> None:
    vectors = [torch.full((NUM,), float(number)) for number in range(3)]
    async with asyncio.timeout(DEADLINE_S), swarm(3, NUM, averaging(Fp32Config()), "memory") as members:
        for turn in range(ROUNDS):
            outs = [torch.empty(NUM) for _ in members]
            given = [vector + turn for vector in vectors]
            each = zip(members, given, outs, strict=True)
            manifests = await asyncio.gather(*(member.average(vector, out) for member, vector, out in each))
            assert {manifest.round for manifest in manifests} == {turn + 1}
            assert all(torch.equal(out, torch.full((NUM,), 1.0 + turn)) for out in outs)
    assert all(sum(member.traffic()) > 0 for member in members)


def test_functions_whose_share_of_a_round_is_measured_are_where_a_profile_is_asked_for_them() -> None:
    named = [each for functions in WHERE.values() for each in functions if each[0] != "~"]  # "~": of Python's own
    assert [
        (file, name)
        for file, name in named
        if not (SOURCE / file).exists() or f"def {name}(" not in (SOURCE / file).read_text(encoding="utf-8")
    ] == []
