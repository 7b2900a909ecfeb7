"""llama.cpp's side of `benchmarks.engine`: reads prompts, goes on by the likeliest token, says its CPU seconds.

It runs in an environment of its own, which has llama-cpp-python, and knows nothing of weft.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CONTEXT = 2048


def main() -> None:
    folder, kind, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the library writes there, too
    side: Side | None = None
    for line in sys.stdin:
        what, num, given = json.loads(line)
        if what == "begin":
            make(folder / f"{kind}.gguf", folder / "f32.gguf")
            side = Side(folder / f"{kind}.gguf", num, threads)
            side.read(given)
            print(0.0, file=told, flush=True)
        else:
            assert side is not None
            began = time.process_time()
            for _ in range(num):
                side.step()
            print(time.process_time() - began, file=told, flush=True)


def make(path: Path, of: Path) -> None:
    """Make a file of eight-bit integers where it is not there: matrices, and what reads the last logits, too."""
    if path.exists():
        return
    given = llama_cpp.llama_model_quantize_default_params()
    given.ftype, given.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, 1
    if llama_cpp.llama_model_quantize(str(of).encode(), str(path).encode(), given):
        raise RuntimeError(f"llama.cpp did not make {path}")


class Side:
    def __init__(self, path: Path, num: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_ubatch, given.n_seq_max = num * CONTEXT // 2, 512, 512, num
        given.n_threads = given.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, given)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._last: list[int] = []
        self._at = 0

    def read(self, prompts: list[list[int]]) -> None:
        self._last = [
            self._decode([(text, 0, place, token) for place, token in enumerate(prompt)], [len(prompt) - 1])[0]
            for text, prompt in enumerate(prompts)
        ]
        self._at = len(prompts[0])

    def step(self) -> None:
        rows = [(text, 0, self._at, token) for text, token in enumerate(self._last)]
        self._last = self._decode(rows, list(range(len(rows))))
        self._at += 1

    def _decode(self, rows: list[tuple[int, int, int, int]], wanted: list[int]) -> list[int]:
        batch: Any = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (text, _, place, token) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, place, 1
            batch.seq_id[row][0], batch.logits[row] = text, row in wanted
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp did not compute the batch")
        found = [
            int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (self._vocab,)).argmax())
            for row in wanted
        ]
        llama_cpp.llama_batch_free(batch)
        return found


if __name__ == "__main__":
    main()
