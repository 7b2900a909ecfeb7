"""Answers to a run's tasks, drawn from the parameters of one round; and others' answers, checked by drawing again.

    seed of an answer     run, place of its task in the run's order, number of the answer
    token at a position   the largest of logits + noise(seed, position)                        (`engine.draw`)

So whoever has the parameters can tell from one forward pass whether a token is the one that was to be drawn: what is in
its place scores worse. Two machines round otherwise, so a token that scores worse by less than `TOLERANCE` may stand.
Rewards are told by nobody: they follow from the tokens.

Token-DiFR: arXiv:2511.20621.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float32
from msgspec import UNSET
from torch import Tensor
from torch.nn.functional import log_softmax

from weft import rng
from weft.chat.speech import Speech
from weft.chat.task_rows import Asked, asked_in
from weft.data.rows import Batch, written
from weft.engine.draw import SEED_NBYTES, Drawing, Drawn, margin
from weft.engine.engine import Engine
from weft.engine.load import engine_of, free_nbytes, kind_as_trained, plan
from weft.engine.scheduling.pages import num_pages
from weft.engine.step import page_nbytes
from weft.engine.text import Wanted
from weft.errors import NotFinite, PeerError, WeftError
from weft.model.config import plain
from weft.model.flat import assemble
from weft.model.peft import merged
from weft.model.transformer import SectionModule
from weft.run.config import RunConfig
from weft.run.frozen import Frozen
from weft.run.reward import RewardConfig
from weft.training.device import Device, allocating
from weft.training.judging import Judge
from weft.training.policy import Answer, Group

AT_ONCE = 64  # texts that are drawn together
CHECKED_NBYTES = 256 << 20  # of logits that are looked at together
TOLERANCE = 0.5  # logits: what bf16 makes of those of a large model, several times over

T = TypeVar("T")
Tokens = tuple[int, ...]
Said = tuple[Asked, Tokens, tuple[float, ...]]  # to what, by which tokens, and their log-probabilities


class Forged(PeerError):
    """An answer is none that was drawn from these parameters by this noise."""


class Outdated(WeftError):
    """The parameters have changed that answers are asked of."""


def noise_of(run: str, place: int, number: int) -> bytes:
    """Return the seed that an answer to the task at a place of the run's order is drawn by."""
    found = rng.integers64(rng.stream(0, "answer", run, place, number), SEED_NBYTES // 8)
    return found.astype("<u8").tobytes()


class Drawer:
    """
    Args:
        frozen: how answers are read, and what an adapter goes beside.
        judge: says what answers are worth; None: they are drawn for others alone, who judge them.
    """

    def __init__(self, run: RunConfig, device: Device, frozen: Frozen, judge: Judge | None) -> None:
        self._run, self._device, self._judge = run, device, judge
        assert frozen.speech is not None
        self._speech: Speech = frozen.speech
        self._base = frozen.base
        self.edition = 0  # how often the parameters have changed
        self._vector: Float32[Tensor, " num"] | None = None
        self._held = 0  # the edition that these two are of
        self._engine: Engine | None = None  # once something is drawn
        self._module: SectionModule | None = None  # once something is checked

    def renew(self, vector: Float32[Tensor, " num"]) -> None:
        """Draw from a copy of these parameters from the next answers on; what is being drawn is still of those before.

        It may run on another thread than all else.
        """
        self._vector = vector.clone()
        self.edition += 1

    def let_go(self) -> None:
        """Take no memory of the device until something is drawn."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._module = None

    def _now(self) -> Float32[Tensor, " num"]:
        """Return the parameters, once what is held of earlier ones is let go."""
        edition, vector = self.edition, self._vector
        assert vector is not None
        if self._held != edition:
            self.let_go()
            self._held = edition
        return vector

    def asked(self, batch: Batch) -> list[Asked]:
        """Return the tasks of rows."""
        rows = written(batch)[:, :-1].numpy()  # the last word is of the row behind
        found = [asked_in(row, self._speech.tokenizer) for row in rows]
        if self._judge is not None:
            self._judge.require(each.check for each in found)
        return found

    def drawn(self, asked: Sequence[Asked], places: Sequence[int]) -> list[Group]:
        """Return the answers to tasks at places of the run's order, judged."""
        vector = self._now()
        answers = self._judged(self._some(vector, asked, places)) if asked else []
        return [Group(task.prompt, some) for task, some in zip(asked, self._by_task(answers), strict=True)]

    def for_others(self, asked: Sequence[Asked], places: Sequence[int], edition: int) -> list[tuple[Tokens, ...]]:
        """Return the tokens of answers to tasks at places of the run's order.

        Args:
            edition: of the parameters that they are to be drawn from.

        Raises:
            Outdated: there are others now.
        """
        vector = self._now()
        if self._held != edition:
            raise Outdated("this peer has the parameters of another round by now")
        return self._by_task([tokens for _, tokens, _ in self._some(vector, asked, places)])

    def likeliest(self, vector: Float32[Tensor, " num"], asked: Iterable[Sequence[Asked]]) -> Iterator[list[Answer]]:
        """Yield answers of the likeliest tokens, by other parameters, to some tasks after the other."""
        engine = self._engine_of(vector)
        try:
            for some in asked:
                wanted = [(task, Drawing(temperature=0.0, num_likeliest=0)) for task in some]
                yield self._judged(self._all(engine, wanted))
        finally:
            engine.close()

    def checked(self, asked: Asked, place: int, answers: Sequence[Tokens]) -> Group:
        """Return answers that somebody else has drawn, once they are seen to be those.

        Raises:
            Forged: they are not; says which, and how far off.
        """
        if len(answers) != self._samples:
            raise Forged(f"there are {len(answers)} answers, and {self._samples} are due")
        most = self._reward.max_tokens
        for number, tokens in enumerate(answers):
            ends = [at for at, token in enumerate(tokens) if token in self._speech.ends]
            is_whole = ends == [len(tokens) - 1] or (not ends and len(tokens) == most)
            if not is_whole or len(tokens) > most or not all(0 <= each < self._run.model.vocab_size for each in tokens):
                raise Forged(f"answer {number} is cut off, goes on behind its end, or has tokens that there are not")
        found = list[Said]()
        for number, (tokens, logits) in enumerate(zip(answers, self._logits(asked, answers), strict=True)):
            drawing, begin = self._drawing(place, number), len(asked.prompt)
            for at, token in enumerate(tokens):
                off = margin(logits[at].double().numpy(), drawing, begin + at, token)
                if off > TOLERANCE:
                    raise Forged(f"token {at} of answer {number} scores {off:.2f} below the one that is drawn there")
            told = log_softmax(logits.double(), -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
            found.append((asked, tokens, tuple(told.tolist())))
        return Group(asked.prompt, tuple(self._judged(found)))

    @property
    def _reward(self) -> RewardConfig:
        assert self._run.reward is not UNSET
        return self._run.reward

    @property
    def _samples(self) -> int:
        return self._reward.samples

    def _drawing(self, place: int, number: int) -> Drawing:
        return Drawing(seed=noise_of(self._run.run, int(place), number), num_likeliest=0)

    def _by_task(self, answers: Sequence[T]) -> list[tuple[T, ...]]:
        return [tuple(answers[start : start + self._samples]) for start in range(0, len(answers), self._samples)]

    def _judged(self, drawn: Sequence[Said]) -> list[Answer]:
        assert self._judge is not None, "it draws for others alone"
        said = [(asked, self._speech.said(tokens)) for asked, tokens, _ in drawn]
        worth = self._judge.worth(said, self._speech.tokenizer.decode)
        return [Answer(tokens, nats, each) for (_, tokens, nats), each in zip(drawn, worth, strict=True)]

    def _whole(self, vector: Float32[Tensor, " num"]) -> Float32[Tensor, " all"]:
        return vector if self._base is None else merged(self._run.model, self._base, vector)

    def _engine_of(self, vector: Float32[Tensor, " num"]) -> Engine:
        device, seq_len, config = self._device.torch, self._run.train.seq_len, plain(self._run.model)
        kind = kind_as_trained(device)
        with allocating("the model that answers are drawn from", self._device):
            self._device.release_cache()  # of models before: what they had counts as taken
            kv_nbytes = AT_ONCE * num_pages(seq_len) * page_nbytes(config, kind)
            planned = plan(config, device, kind, seq_len, kv_nbytes, free_nbytes(device))
            return engine_of(config, self._whole(vector), device, planned, seq_len)

    def _logits(self, asked: Asked, answers: Sequence[Tokens]) -> list[Float32[Tensor, "tokens vocab"]]:
        """Return of each answer the logits of its tokens, on the CPU."""
        device, vector = self._device.torch, self._now()
        begin, longest = len(asked.prompt) - 1, max(map(len, answers))
        rows = torch.zeros(len(answers), begin + longest, dtype=torch.int64)
        for row, tokens in enumerate(answers):
            whole = torch.tensor([*asked.prompt, *tokens[:-1]])
            rows[row, : len(whole)] = whole
        at_once = max(1, CHECKED_NBYTES // (4 * rows.shape[1] * self._run.model.vocab_size))
        found = list[Tensor]()
        with allocating("the model that answers are checked by", self._device):
            if self._module is None:
                self._module = assemble(plain(self._run.model), self._whole(vector).to(device))
            with torch.inference_mode(), self._device.autocast():
                for start in range(0, len(rows), at_once):
                    some = rows[start : start + at_once]
                    found += self._module(some.to(device))[:, begin:].float().cpu()
        return [each[: len(tokens)] for each, tokens in zip(found, answers, strict=True)]

    def _some(self, vector: Float32[Tensor, " num"], asked: Sequence[Asked], places: Sequence[int]) -> list[Said]:
        """Return all answers to tasks at places of the run's order, one task behind the other."""
        if self._engine is None:
            self._engine = self._engine_of(vector)
        wanted = [
            (task, self._drawing(place, number))
            for task, place in zip(asked, places, strict=True)
            for number in range(self._samples)
        ]
        return self._all(self._engine, wanted)

    def _all(self, engine: Engine, wanted: Sequence[tuple[Asked, Drawing]]) -> list[Said]:
        """Return an answer to each."""
        with ThreadPoolExecutor(1) as pool:  # an event loop of its own, whatever this thread has
            drawn = pool.submit(asyncio.run, self._together(engine, wanted)).result()
        return [(asked, *each) for (asked, _), each in zip(wanted, drawn, strict=True)]

    async def _together(
        self, engine: Engine, wanted: Sequence[tuple[Asked, Drawing]]
    ) -> list[tuple[Tokens, tuple[float, ...]]]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(task: Asked, drawing: Drawing) -> tuple[Tokens, tuple[float, ...]]:
            async with turns:
                drawn = list[Drawn]()
                text = engine.begin(Wanted("rewards", task.prompt, self._reward.max_tokens, drawing))
                async for each in text:
                    drawn.append(each)
                    if each.token in self._speech.ends:  # which is learnt, too: an engine does not tell it
                        text.cancel()
                        break
            if text.ended == "cancelled" and not (drawn and drawn[-1].token in self._speech.ends):
                raise Outdated("this peer draws no more answers")
            tokens = tuple(each.token for each in drawn)
            logprobs = tuple(each.logprob or 0.0 for each in drawn)
            if not np.isfinite(logprobs).all():
                raise NotFinite("a probability is NaN: the weights are broken. Resume from an earlier checkpoint.")
            return tokens, logprobs

        return await asyncio.gather(*(one(*each) for each in wanted))
