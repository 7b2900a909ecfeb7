"""What each rank of a site holds, and does when it is told: a strip of every vector, and a shard of the model.

    rank 0      Site.order(order) ──tell──► do(order)
    the others  serve: hear ──────────────► do(order), again and again

An order is done by all ranks at the same time. A rank that fails ends, and with it the site.
"""

import gc

import msgspec
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.data.rows import Batch
from weft.ids import Digest
from weft.ranks import orders
from weft.ranks.line import Line, passed
from weft.ranks.shard import Shard
from weft.ranks.strips import strips
from weft.run.machine import PeerConfig
from weft.store.chunks import chunk_digests
from weft.sync.merge import outer as optimizers
from weft.sync.merge.outer import StepContext, square_sums
from weft.training.device import choose

# What may be computed with strips, by methods of tensors. Those that end with _ change their first argument.
OPERATIONS = frozenset({"add", "sub", "mul", "lerp", "clone", "add_", "sub_", "mul_", "copy_", "zero_"})


class Worker:
    """
    Args:
        settings: what this rank's machine gives.
    """

    def __init__(self, line: Line, settings: PeerConfig) -> None:
        self.rank = line.rank
        self._line = line
        self._settings = settings
        self._resize(0)
        self._vectors: dict[int, Tensor] = {}
        self._shard: Shard | None = None

    def forget(self, dropped: tuple[int, ...]) -> None:
        for vector in dropped:
            self._vectors.pop(vector, None)

    def do(self, order: orders.Order, data: tuple[Tensor, ...] = ()) -> object:
        """Do what all ranks do now, and return what rank 0 wants of it.

        Args:
            data: on rank 0, what the order is about: where to read to, what to write, a batch; else nothing.
        """
        match order:
            case orders.Size(num=num):
                self._resize(num)
            case orders.Compute():
                self._compute(order)
            case orders.Fresh(vector=vector):
                self._vectors[vector] = torch.zeros(len(self._mine))
            case orders.Read() | orders.Write():
                self._pass(order, *data)
            case orders.Digests(vector=vector):
                answers = self._line.answer(msgspec.msgpack.encode(chunk_digests(self._vectors[vector])))
                return [each for answer in answers for each in msgspec.msgpack.decode(answer, type=list[Digest])]
            case orders.SquareSums(vector=vector):
                answers = self._line.answer(msgspec.msgpack.encode(list(square_sums(self._vectors[vector]))))
                return [each for answer in answers for each in msgspec.msgpack.decode(answer, type=list[float])]
            case orders.OuterStep():
                self._outer_step(order)
            case orders.Begin():
                self._begin(order)
            case orders.Leave() | orders.Close():
                self._drop_shard()
            case orders.Still():
                pass
            case _:
                return self._with_model(order, data)
        return None

    def _resize(self, num: int) -> None:
        self._strips = strips(num, self._line.num_ranks)
        self._mine = self._strips[self._line.rank]

    def _compute(self, order: orders.Compute) -> None:
        if order.operation not in OPERATIONS:
            raise ValueError(f"no operation of a site: {order.operation}")
        first, *others = [self._vectors[vector] for vector in order.vectors]
        extra: dict[str, object] = {} if order.alpha is None else {"alpha": order.alpha}
        if order.into in self._vectors and not order.operation.endswith("_"):
            extra["out"] = self._vectors[order.into]  # in its memory: there may be no room for another
            getattr(torch, order.operation)(first, *others, *order.numbers, **extra)
        else:
            self._vectors[order.into] = getattr(first, order.operation)(*others, *order.numbers, **extra)

    def _pass(self, order: orders.Read | orders.Write, whole: Float32[Tensor, " piece"] | None = None) -> None:
        """Bring what ranks hold of a piece to rank 0, where `whole` is, or back."""
        held, piece = self._vectors[order.vector], range(order.start, order.stop)
        self._line.wait(passed(self._line, self._strips, held, piece, whole, is_read=isinstance(order, orders.Read)))

    def _outer_step(self, order: orders.OuterStep) -> None:
        merged, num = self._vectors[order.merged], len(self._mine)
        if order.shorten != 1.0:
            merged = merged.mul(order.shorten)
        context = StepContext(
            number=order.number,
            round=order.round,
            lr=order.lr,
            num_decayed=min(max(order.num_decayed - self._mine.start, 0), num),
        )
        state = {name: self._vectors[vector] for name, vector in order.state.items()}
        config = order.by or order.by_inner
        assert config is not None
        optimizers.build(config).apply(self._vectors[order.outer], state, merged, context)

    # --- the model ---

    def _begin(self, order: orders.Begin) -> None:
        if self._settings.num_threads:
            torch.set_num_threads(self._settings.num_threads)
        self._drop_shard()  # before another takes memory
        self._shard = Shard(self._line, order.run, self._settings)
        self._shard.set_local(self._vectors[order.local])

    def _drop_shard(self) -> None:
        """Give the device's memory back, and what modules hold of the line: they know each other, and go together."""
        if self._shard is not None:
            self._shard = None
            gc.collect()
            choose(self._settings).release_cache()

    def _with_model(self, order: orders.ModelOrder, data: tuple[Tensor, ...]) -> object:
        shard, vectors = self._shard, self._vectors
        assert shard is not None
        match order:
            case orders.Gradient(micro_batch=micro_batch):
                return shard.fill(self._shared(order, data), micro_batch)
            case orders.Pull(strength=strength):
                return shard.pull(strength)
            case orders.Move(shorten=shorten, learning_rate=learning_rate):
                shard.move(shorten, learning_rate)
            case orders.TakeGradient(shorten=shorten, into=into):
                vectors[into] = shard.gradient(shorten)
            case orders.DropGradient():
                shard.drop_gradient()
            case orders.Local(into=into):
                vectors[into] = shard.local()
            case orders.SetLocal(vector=vector):
                shard.set_local(vectors[vector])
            case orders.SetAnchor(vector=vector):
                shard.set_center(vectors[vector])
            case orders.ReadMoment(name=name, start=start, stop=stop):
                shard.read_moment(name, range(start, stop), *data)
            case orders.Moments(into=names):
                vectors.update({names[name]: strip for name, strip in shard.moments().items()})
            case orders.SetMoments(vectors=names, num_steps=num_steps):
                shard.set_moments({name: vectors[vector] for name, vector in names.items()}, num_steps)
            case orders.Wear(vector=vector):
                shard.wear(vectors[vector])
            case orders.Unwear():
                shard.unwear()
            case orders.Loss(micro_batch=micro_batch):
                return shard.summed_loss(self._shared(order, data), micro_batch)
            case orders.Generate(prompt=prompt, sampling=sampling, seed=seed, within_s=within_s):
                return shard.generate(prompt, sampling, seed, within_s)
        return None

    def _shared(self, order: orders.Gradient | orders.Loss, data: tuple[Tensor, ...]) -> Batch:
        """Return the batch that rank 0 has."""
        shape = order.num_samples, order.seq_len
        tensors = data or tuple(torch.empty(shape, dtype=torch.int64) for _ in range(2 + order.has_positions))
        for tensor in tensors:
            self._line.share(tensor)
        return Batch(*tensors)
