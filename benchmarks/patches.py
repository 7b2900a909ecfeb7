"""What a patch between two models takes, by how the newer one was trained.

    python -m benchmarks.patches FOLDER          # of a model in safetensors, such as SmolLM2-135M-Instruct

A model in bf16 is trained in fp32 for some steps on conversations (`rig.tasks`), whole or by an adapter that is merged
into it, and rounded to bf16 again. Beside a patch (`weft patch make`) stand the words of both, one XOR the other, as
zlib packs them, and the adapter itself. The newer folder is made again of each patch, and compared.
"""

import argparse
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.rig.tasks import conversation, drawn
from weft.data.tokenizer import JsonTokenizer
from weft.model.config import AdapterConfig, ModelConfig
from weft.model.flat import over
from weft.model.initial import initial_vector
from weft.model.peft import merged
from weft.model.transformer import Transformer
from weft.model.weights import read_folder, write_folder
from weft.store import patch
from weft.sync.method.choices import AdamWConfig
from weft.training import optimizer as inner

SEQ_LEN, BATCH = 256, 2
ADAPTER = AdapterConfig(rank=16)
HEADER = (
    *("trained", "rate", "steps", "numbers that changed", "patch, bytes", "of the whole"),
    *("bits a number that changed", "XOR by zlib, times", "make, s", "apply, s", "the adapter, bytes"),
)


@dataclass(frozen=True)
class Way:
    """How the newer model is trained."""

    what: str
    lr: float
    num_steps: int
    is_adapter: bool = False


WAYS = (
    Way("whole, as rewards tune", 1e-6, 1),
    Way("whole, as rewards tune", 1e-6, 10),
    Way("whole, as conversations tune", 1e-5, 10),
    Way("an adapter of rank 16, merged", 1e-4, 10, is_adapter=True),
)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a model")
    asked, load = parser.parse_args(words), report.load()
    config, base = read_folder(asked.model)
    base, rows = base.bfloat16().float(), _rows(asked.model)
    cells = list[tuple[object, ...]]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder / "old", config, base, dtype="bfloat16")
        for number, way in enumerate(WAYS):
            here = folder / str(number)
            here.mkdir()
            vector, adapter_nbytes = _trained(config, base, rows, way)
            write_folder(here / "new", config, vector, dtype="bfloat16")
            cells.append((way.what, f"{way.lr:g}", way.num_steps, *_patched(folder / "old", here), adapter_nbytes))
            print(*cells[-1], flush=True)
    sections = [report.table(HEADER, cells), report.load_line(load)]
    report.write("patches", "What a patch between two models takes", "python -m benchmarks.patches FOLDER", sections)


def _rows(folder: Path) -> Tensor:
    tokenizer = JsonTokenizer.from_file(folder)
    told = (conversation(each) for each in drawn(1, 2000))
    text = "\n".join(str(message["content"]) for each in told for message in each["messages"])
    ids = torch.from_numpy(np.asarray(tokenizer.encode(text), np.int64))
    num = len(ids) // (SEQ_LEN + 1)
    return ids[: num * (SEQ_LEN + 1)].view(num, SEQ_LEN + 1)


def _trained(config: ModelConfig, base: Tensor, rows: Tensor, way: Way) -> tuple[Tensor, int | str]:
    """Return the model after some steps, and the bytes of its adapter, in fp32."""
    trained = msgspec.structs.replace(config, adapter=ADAPTER) if way.is_adapter else config
    vector = initial_vector(trained, 1) if way.is_adapter else base.clone()
    model = over(Transformer(trained), vector, base if way.is_adapter else None)
    optimizer = inner.build(AdamWConfig(), model)
    for step in range(way.num_steps):
        batch = rows[step * BATCH : (step + 1) * BATCH]
        model.zero_gradient()
        model.module.loss(batch[:, :-1], batch[:, 1:]).backward()  # type: ignore[no-untyped-call]
        norm = float(model.gradient.norm())
        model.gradient.mul_(min(1.0, 1.0 / norm))
        optimizer.step(way.lr)
    if not way.is_adapter:
        return model.vector, ""
    return merged(trained, base, model.vector), 4 * model.vector.numel()


def _patched(old: Path, here: Path) -> tuple[object, ...]:
    began = time.perf_counter()
    told = patch.write(old, here / "new", here / "patch")
    made = time.perf_counter()
    patch.apply(old, here / "patch", here / "again")
    applied = time.perf_counter()
    for path in (here / "new").iterdir():
        if path.read_bytes() != (here / "again" / path.name).read_bytes():
            raise RuntimeError(f"{path.name} does not come back")
    first, then = (np.memmap(each / "model.safetensors", np.uint8, "r") for each in (old, here / "new"))
    packed = len(zlib.compress((first ^ then).tobytes(), 6))
    nbytes = (here / "patch").stat().st_size
    share = f"{100 * told.num_changed / told.num_words:.2f} %"
    of_whole = f"{100 * nbytes / told.new_nbytes:.2f} %"
    bits = f"{8 * nbytes / max(1, told.num_changed):.1f}"
    return share, nbytes, of_whole, bits, f"{packed / nbytes:.2f}", f"{made - began:.0f}", f"{applied - made:.0f}"


if __name__ == "__main__":
    main(sys.argv[1:])
