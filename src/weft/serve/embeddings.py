"""Embeddings: a text as one vector, the mean of its last hidden states, scaled to length 1 as the API has it.

    texts ──engine, `AT_A_TIME` of them together──► means ──► float, or base64 of little-endian fp32

Nothing is drawn, and no pages are shared: what another text has read already has no hidden states any more.
"""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.engine.text import Full, Text, Wanted
from weft.rng import fresh_secret
from weft.serve.completions import texts_of
from weft.serve.failures import Fault, unavailable, wrong
from weft.serve.generation import Model, Serving
from weft.serve.keys import Visit
from weft.serve.schemas import MAX_INPUTS, EmbeddingRequest

AGAIN_S = 1.0  # after which a text for which there was no place is tried again
AT_A_TIME = 16  # texts of one request: others have their turns between


class Embedding:
    """Embeddings under way."""

    def __init__(
        self, request: EmbeddingRequest, model: Model, prompts: Sequence[Sequence[int]], visit: Visit, serving: Serving
    ) -> None:
        self._request, self._model, self._prompts = request, model, prompts
        self._visit, self._serving = visit, serving
        self._texts: set[Text] = set()
        self._num_read = 0

    async def whole(self) -> dict[str, Any]:
        """Return the answer.

        Raises:
            Fault: it took too long.
            Full: too many texts wait.
        """
        model, limits, num = self._model, self._serving.limits, sum(map(len, self._prompts))
        gate = asyncio.Semaphore(AT_A_TIME)
        began_s = self._serving.clock.now()
        reason = "error"
        try:
            async with asyncio.timeout(limits.max_time_s):
                vectors = await asyncio.gather(*(self._mean(prompt, gate) for prompt in self._prompts))
            reason = "stop"
        except TimeoutError:
            raise unavailable(f"The embeddings took longer than {limits.max_time_s:g} s.", "timeout", 5.0) from None
        finally:
            self.cancel()
            now = self._serving.clock.now()
            self._serving.metrics.asked(model.id, num, 1, 0)
            self._serving.metrics.ended(model.id, reason, (began_s, began_s, now, now), 0)
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": num, "total_tokens": num}
        return {"object": "list", "model": model.id, "data": data, "usage": usage}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer as one event."""
        yield await self.whole()

    def cancel(self) -> None:
        """Read no more."""
        for text in self._texts:
            text.cancel()

    async def _read(self, wanted: Wanted) -> Text | None:
        """Have a text read; None: there was no place for it, while others of this request have been read."""
        self._visit.charge(len(wanted.prompt))  # before: who leaves meanwhile has had it read
        try:
            text = self._model.engine.begin(wanted)
            self._texts.add(text)
            async for _ in text:
                pass
        except Full:
            self._visit.charge(-len(wanted.prompt))
            if not self._num_read:
                raise
            return None
        self._num_read += 1
        return text

    async def _mean(self, prompt: Sequence[int], gate: asyncio.Semaphore) -> NDArray[np.float32]:
        asker = self._visit.asker
        wanted = Wanted(asker.name, tuple(prompt), 1, salt=fresh_secret(32), room=asker.room, is_mean=True)
        async with gate:
            while (text := await self._read(wanted)) is None:  # noqa: ASYNC110  # nobody tells of places
                await asyncio.sleep(AGAIN_S)
        if text.mean is None:
            raise unavailable("The model is being unloaded; ask again.", "unloaded", 1.0)
        length = float(np.linalg.norm(text.mean))
        if not np.isfinite(length):
            raise Fault(500, "The model's hidden states are not finite.", "server_error", code="server_error")
        return text.mean / np.float32(length or 1.0)

    def _written(self, vector: NDArray[np.float32]) -> str | list[float]:
        if self._request.encoding_format == "base64":
            return b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(each) for each in vector]


async def begin(request: EmbeddingRequest, model: Model, visit: Visit, serving: Serving) -> Embedding:
    """Begin embeddings.

    Raises:
        Fault: they cannot be made as they are asked for.
    """
    if request.stream:
        raise wrong("stream: embeddings come whole; leave it out.", "stream")
    if request.dimensions is not None:
        raise wrong("dimensions: vectors are as wide as the model; leave it out.", "dimensions")
    prompts = await asyncio.to_thread(texts_of, request.input, model, MAX_INPUTS, "input")
    for number, prompt in enumerate(prompts):
        param = "input" if len(prompts) == 1 else f"input[{number}]"
        if not prompt:
            raise wrong(f"{param}: the text is empty. Give at least one token.", param)
        if len(prompt) >= model.context:
            said = f"This model's maximum context length is {model.context} tokens. The text has {len(prompt)}."
            raise wrong(said, param, "context_length_exceeded")
    visit.check(sum(map(len, prompts)))
    return Embedding(request, model, prompts, visit, serving)
