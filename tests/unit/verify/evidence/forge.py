"""Works, steps and merged parts as a member signs them, honest ones and others, with all that is needed to judge them.

They are made by what members train and merge with; what is false is changed afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from charters import charter
from unit.peer.snapshots import manifest
from weft.codec.config import Bf16Config, CodecConfig, Fp32Config, Int4Config, Int8Config
from weft.data.assign import Lease
from weft.ids import Attempt, Digest, Round, Tokens
from weft.keys import Identity
from weft.ledger.tree import Tree
from weft.store.chunks import state_index
from weft.sync.merge import outer
from weft.sync.merge.outer import norm
from weft.sync.merge.reduce import Merger, codec_in, coding_in, encode_parts
from weft.sync.method.choices import AdamWConfig, Choices, InnerSgdConfig, NesterovConfig
from weft.sync.method.schedule import WsdConfig, lr
from weft.sync.records.charter import AuditTerms, Charter, ExactTerms
from weft.sync.records.messages import Collect, Contribution, Manifest, Merged, RoundNote, payload_of
from weft.sync.records.parts import cut
from weft.sync.records.weights import awaited_weight, weight_of
from weft.sync.records.work import MadeStep, Segment, Work
from weft.verify.evidence.records import Ground, ShownState
from weft.wire import Buffer, Signed, digest, digest_of, encode, seal

PEERS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 6)), key=lambda each: each.peer)
ME, OTHER = PEERS[0], PEERS[1]
SEQ_LEN, BATCH = 8, 2
Vectors = dict[str, Tensor]


ADAMW = AdamWConfig()
CODECS: list[CodecConfig] = [  # whose blocks can be shown apart
    Fp32Config(),
    Bf16Config(),
    Int8Config(block=64),
    Int4Config(block=32),
    Int8Config(block=4096),
]


def terms(optimizer: AdamWConfig | InnerSgdConfig = ADAMW, clip: float = 1.0, num_decayed: int = 300) -> ExactTerms:
    return ExactTerms(optimizer=optimizer, clip=clip, num_decayed=num_decayed)


def rules(codec: CodecConfig | None = None, exact: ExactTerms | None = None, every: int = 1, **choices: Any) -> Charter:
    """Return the charter of a run that audits."""
    method = Choices(every=4, send="delta", apply=NesterovConfig(), codec=codec or Int8Config(block=64), **choices)
    schedule = WsdConfig(lr=3e-3, warmup_tokens=1000, decay_tokens=400, total_tokens=4000)
    settled = charter(4, batch_size=BATCH, method=method, schedule=schedule)
    audits = AuditTerms(rate=0.1, trace_every=every, exact=exact or terms())
    return msgspec.structs.replace(settled, audits=audits)


def head(round: int, charter: Charter, previous: Manifest | None = None, **leases: int) -> Manifest:
    """Return the manifest that gives the leases of the round after it.

    Args:
        leases: samples of `me` and `other`; 8 and 8 unless said otherwise.
    """
    wanted = {ME.peer: leases.get("me", 8), OTHER.peer: leases.get("other", 8)}
    start, given = 100 * round, []
    for peer, num in sorted(wanted.items()):
        if num:
            given.append(Lease(peer=peer, start=start, stop=start + num))
            start += num
    return msgspec.structs.replace(
        manifest(round),
        previous=digest_of(previous) if previous is not None else "00" * 32,
        leases=tuple(given),
        uplinks=(16, 8),
        committed_tokens=Tokens(32 * round),
        charter=digest_of(charter),
    )


@dataclass
class Done:
    """A work, and what only its worker has."""

    work: Work
    heads: list[Manifest]
    charter: Charter
    states: list[Vectors]
    slopes: dict[int, tuple[Tensor, float]]  # gradients and their lengths, by the state before
    payload: tuple[Buffer, ...]
    names: list[Digest]

    @property
    def signed(self) -> Signed:
        return seal(ME, self.work)

    def ground(self, segment: int = 0) -> Ground:
        return Ground(manifest=self.heads[segment], charter=self.charter)

    def shown(self, number: int, state: Mapping[str, Tensor] | None = None) -> ShownState:
        """Return a state as it is shown; `state` in place of the one there."""
        index = encode(state_index(state or self.states[number]))
        return ShownState(index=index, path=self.tree.path(number))

    @property
    def tree(self) -> Tree:
        return Tree(bytes.fromhex(name) for name in self.names)

    def renamed(self, **fields: Any) -> "Done":
        """Return it with its states named anew, and other words."""
        names = [digest_of(state_index(each)) for each in self.states]
        root = Tree(bytes.fromhex(name) for name in names).root()
        payload = payload_of(map(digest, self.payload))
        work = msgspec.structs.replace(self.work, **{"trace": root, "payload": payload, **fields})
        return replace(self, work=work, names=names)

    def made(self, before: int, slope: Tensor | None = None, length: float | None = None) -> MadeStep:
        found, found_length = self.slopes[before]
        slope = found if slope is None else slope
        return MadeStep(
            run=self.work.run,
            work=digest_of(self.signed),
            before=before,
            gradient=digest_of(state_index({"gradient": slope})),
            norm=found_length if length is None else length,
        )


def done(
    seed: int = 0,
    num: int = 700,
    segments: int = 1,
    follows: Done | None = None,
    rules: Charter = rules(),  # noqa: B008  # it is never changed
    **leases: int,
) -> Done:
    """Return honest work of two steps a segment."""
    luck = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(num, generator=luck)  # noqa: E731
    audits = rules.audits
    assert audits
    assert audits.exact
    exact, optimizer = audits.exact, outer.build(audits.exact.optimizer)
    num_before = 0 if follows is None else follows.work.num_before + follows.work.num_steps
    start = draw()
    local, count = start.clone(), num_before
    moments = optimizer.init(num) if follows is None else _others(follows.states[-1])
    states, slopes, heads, told = list[Vectors](), {}, list[Manifest](), list[Segment]()
    first = 3 if follows is None else follows.work.round
    for number in range(segments):
        heads.append(head(first + number, rules, heads[-1] if heads else None, **leases))
        if number:
            local = local + draw() * 0.01
        states.append(_copied(local, moments))
        leased = sum(each.num_windows for each in heads[-1].leases if each.peer == ME.peer)
        pace = sum(each.num_windows for each in heads[-1].leases) / leased
        for step in range(2):
            gradient = draw() * (0.01 if step else 1.0)
            length, count = norm(gradient), count + 1
            slopes[len(states) - 1] = gradient.clone(), length
            if length > exact.clip:
                gradient.mul_(exact.clip / length)
            tokens = heads[-1].committed_tokens + int((step + 1) * BATCH * SEQ_LEN * pace)
            rate = lr(rules.settings.schedule, tokens)
            at = outer.StepContext(number=count, lr=rate, num_decayed=min(exact.num_decayed, num))
            optimizer.apply(local, moments, gradient, at)
            if audits.trace_every == 1 or step == 1:
                states.append(_copied(local, moments))
        told.append(Segment(head=digest_of(heads[-1]), round=heads[-1].round, holder=ME.peer, num_steps=2))
    parts = cut(num, heads[-1].uplinks)
    payload = encode_parts(codec_in(rules.settings.method, 4), start - local, parts)
    work = Work(
        run=heads[0].run,
        branch=heads[0].branch,
        round=Round(heads[-1].round + 1),
        peer=ME.peer,
        segments=tuple(told),
        follows=None if follows is None else digest_of(follows.signed),
        num_before=num_before,
        trace=Digest("00" * 32),
        payload=Digest("00" * 32),
        tokens=Tokens(segments * 2 * BATCH * SEQ_LEN),
        error=None,
        left=None,
    )
    return Done(work, heads, rules, states, slopes, payload, []).renamed()


def _copied(local: Tensor, moments: Mapping[str, Tensor]) -> Vectors:
    return {"local": local.clone(), **_others(moments)}


def _others(state: Mapping[str, Tensor]) -> Vectors:
    return {name: vector.clone() for name, vector in state.items() if name != "local"}


def numbers(state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: vector.numpy() for name, vector in state.items()}


@dataclass
class Mixed:
    """A part that an owner has merged."""

    head: Manifest
    charter: Charter
    plan: Collect
    num: int
    brought: dict[Digest, Buffer]
    right: Buffer

    @property
    def ground(self) -> Ground:
        return Ground(manifest=self.head, charter=self.charter)

    def note(self, result: Buffer, **fields: Any) -> RoundNote:
        merged = Merged(
            attempt=self.plan.attempt,
            revision=self.plan.revision,
            part=1,
            result=digest(result),
            plan=digest_of(self.plan),
            head=digest_of(self.head),
        )
        message = msgspec.structs.replace(merged, **fields)
        return RoundNote(branch=self.head.branch, round=Round(self.head.round + 1), message=message)


def mixed(seed: int = 0, num: int = 5000, num_peers: int = 3, rules: Charter = rules(), has_late: bool = True) -> Mixed:  # noqa: B008
    """Return an honest part, as `Merger` makes it."""
    luck = np.random.default_rng(seed)
    before = head(3, rules)
    codec = codec_in(rules.settings.method, 4)
    brought, contributions = dict[Digest, Buffer](), []
    for number, each in enumerate(PEERS[:num_peers]):
        data = codec.encode(torch.from_numpy(luck.standard_normal(num, np.float32) * 10.0 ** (number - 1)))
        brought[digest(data)] = data
        tokens = Tokens(int(luck.integers(0, 80)) if number else 64)
        parts = (digest(b"part 0 of %d" % number), digest(data))
        contributions.append(Contribution(peer=each.peer, tokens=tokens, parts=parts))
    plan = Collect(
        attempt=Attempt(0),
        revision=0,
        contributions=tuple(contributions),
        owners=(ME.peer, OTHER.peer),
        awaited=(OTHER.peer,) if has_late else (),
    )
    late = awaited_weight(rules, plan.awaited, before.leases, ())
    merger = Merger(num, coding_in(rules.settings.method, 4), late)
    for each in plan.contributions:
        merger.add(weight_of(rules, each), brought[Digest(each.parts[1])])
    return Mixed(before, rules, plan, num, brought, bytes(merger.result().encoded))
