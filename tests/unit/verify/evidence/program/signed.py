"""What a worker signs of a step whose gradient is audited, honest or not, and all that is needed to judge it."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from charters import charter
from unit.verify.evidence.forge import ME, head, terms
from unit.verify.evidence.program.made import SMALL, Made, model_of
from weft.codec.config import Fp32Config
from weft.data import assign
from weft.data.store import DataIndex, ShardInfo
from weft.ids import Digest, Round, Tokens
from weft.ledger.tree import Tree
from weft.model.config import ModelConfig
from weft.sync.method.choices import Choices, NesterovConfig
from weft.sync.method.schedule import WsdConfig
from weft.sync.records.charter import AuditTerms, Charter, GradientTerms
from weft.sync.records.index import StateIndex, VectorIndex
from weft.sync.records.messages import Manifest
from weft.sync.records.work import MadeStep, Segment, Work
from weft.verify.evidence.operations import prove_list, prove_operation, read_by, tree_of
from weft.verify.evidence.program.evaluate import as_words, listed, named
from weft.verify.evidence.program.grids import Array
from weft.verify.evidence.program.step import program
from weft.verify.evidence.records import FalseList, FalseOperation, Ground, ShownState
from weft.wire import Signed, digest, digest_of, encode, seal

SAMPLES, TOKENS, MICRO_BATCH, SEED = 3, 8, 2, 5


@dataclass(frozen=True)
class Step:
    """The second step of a lease, as it should be."""

    made: Made
    work: Work
    head: Manifest
    charter: Charter
    before: ShownState
    names: tuple[Digest, ...]
    data: DataIndex
    shards: dict[Digest, bytes]

    @property
    def ground(self) -> Ground:
        return Ground(manifest=self.head, charter=self.charter)

    def listing(self, names: tuple[Digest, ...] | None = None, **said: Any) -> MadeStep:
        """Return what the worker signs; `names` of what its operations came to."""
        names = names or self.names
        gradient = names[self.made.program.gradient]
        honest = MadeStep(
            run=self.work.run,
            work=digest_of(seal(ME, self.work)),
            before=1,
            gradient=gradient,
            norm=self.made.length,
            operations=_root(names),
        )
        return replace(honest, **said)

    def letters(self, made: MadeStep) -> tuple[Signed, Signed]:
        return seal(ME, self.work), seal(ME, made)

    def changed(self, number: int, at: int, bits: int = 1) -> tuple[Array, tuple[Digest, ...]]:
        """Return what an operation came to, with one word changed, and what the worker lists then."""
        false = self.made.outputs[number].copy()
        false.view(np.uint32)[at] ^= bits
        names = list(self.names)
        names[number] = digest_of(listed(self.made.program, number, false))
        return false, tuple(names)

    def proven(self, number: int, false: Array, names: tuple[Digest, ...]) -> FalseOperation:
        made = self.made
        return prove_operation(
            self.work,
            self.listing(names),
            self.ground,
            self.before,
            made.parameters,
            names,
            number,
            as_words(false),
            {each: made.outputs[each] for each in read_by(made.program, number)},
            self.data,
            self.shards.get,
        )

    def listed_falsely(self, number: int, names: tuple[Digest, ...], made: MadeStep, index: bytes | None) -> FalseList:
        return prove_list(self.work, made, self.ground, names, number, index)


def data_of(vocab: int, dtype: Any = "uint16") -> tuple[DataIndex, dict[Digest, bytes]]:
    luck, shards, infos = np.random.default_rng(7), dict[Digest, bytes](), list[ShardInfo]()
    for num in (401, 97, 1200):
        raw = luck.integers(0, vocab, num).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        shards[digest(raw)] = raw
        infos.append(ShardInfo(digest=digest(raw), num_tokens=num, nbytes=len(raw)))
    index = DataIndex(
        dtype=dtype,
        train=tuple(infos),
        heldout=(),
        train_text_nbytes=1,
        heldout_text_nbytes=0,
        tokenizer=digest(b"tokenizer"),
        vocab_size=vocab,
    )
    return index, shards


def words_at(index: DataIndex, shards: dict[Digest, bytes], positions: range) -> Array:
    stream = np.concatenate(
        [np.frombuffer(shards[each.digest], f"<u{2 if index.dtype == 'uint16' else 4}") for each in index.train]
    )
    windows = assign.windows_at(np.array(positions), assign.num_windows(len(stream), TOKENS), SEED)
    return np.stack([stream[each * TOKENS :][: TOKENS + 1] for each in windows]).astype(np.uint32)


def rules_of(model: ModelConfig, data: DataIndex, **changes: Any) -> Charter:
    method = Choices(every=4, send="delta", apply=NesterovConfig(), codec=Fp32Config())
    schedule = WsdConfig(lr=3e-3, warmup_tokens=1000, decay_tokens=400, total_tokens=4000)
    settled = charter(
        4, **({"batch_size": SAMPLES, "seq_len": TOKENS, "method": method, "schedule": schedule} | changes)
    )
    of_gradient = GradientTerms(model=model, micro_batch=MICRO_BATCH, seed=SEED, data=digest_of(data))
    exact = replace(terms(), gradient=of_gradient)
    return replace(settled, audits=AuditTerms(rate=0.1, trace_every=1, exact=exact))


@cache
def _root(names: tuple[Digest, ...]) -> Digest:
    return tree_of(names).root()


@cache
def signed_step(dtype: str = "uint16", **form: Any) -> Step:
    config = replace(SMALL, **form)
    data, shards = data_of(config.vocab_size, dtype)
    charter = rules_of(config, data)
    before_round = head(3, charter, me=2 * SAMPLES)
    (lease,) = (each for each in before_round.leases if each.peer == ME.peer)
    samples = words_at(data, shards, range(lease.start + SAMPLES, lease.start + 2 * SAMPLES))
    vector = model_of(config).vector.detach().numpy()
    made = Made(program(config, SAMPLES, TOKENS, MICRO_BATCH), vector, samples)
    zeros = np.zeros_like(vector)
    state = encode(_index({"local": vector, "moment1": zeros, "moment2": zeros}))
    trace = Tree([b"\0" * 32, bytes.fromhex(digest(state)), b"\1" * 32])
    segment = Segment(head=digest_of(before_round), round=before_round.round, holder=ME.peer, num_steps=2)
    work = Work(
        run=before_round.run,
        branch=before_round.branch,
        round=Round(before_round.round + 1),
        peer=ME.peer,
        segments=(segment,),
        follows=None,
        num_before=0,
        trace=trace.root(),
        payload=Digest("00" * 32),
        tokens=Tokens(2 * SAMPLES * TOKENS),
        error=None,
        left=None,
    )
    names = tuple(named(made.program, vector, samples))
    before = ShownState(index=state, path=trace.path(1))
    return Step(made, work, before_round, charter, before, names, data, shards)


def _index(vectors: dict[str, Array]) -> StateIndex:
    return StateIndex(
        vectors=tuple(
            VectorIndex(name=name, num=len(each), chunks=(digest(each.tobytes()),)) for name, each in vectors.items()
        )
    )
