"""The members that benchmarks measure still are what a run's are: they meet, and average what they are given."""

import asyncio

import torch
from benchmarks._member import averaging, swarm

from weft.codec.config import Fp32Config

DEADLINE_S = 60.0
NUM, ROUNDS = 1000, 3


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
