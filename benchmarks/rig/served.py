"""A real `weft serve` with API keys on loopback, of a small model that was never trained, and what it says of itself.

    make_model(folder / "model", "tiny")
    with Served(folder, folder / "model", {"anna": {}, "bert": {"concurrent": 4}}) as served:
        served.host, served.port, served.secrets["anna"], served.metrics(), served.nbytes()

It has a home of its own, beside what it prints and says.
"""

import http.client
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil
import torch

from weft import rng
from weft.data.tokenizer import CharTokenizer
from weft.model.config import Size, named, num_parameters
from weft.model.weights import write_folder
from weft.serve.keys import new_key, save_keys

CONTEXT = 4096
LETTERS = "".join(map(chr, range(32, 127)))
START_S, END_S, ASK_S = 120.0, 30.0, 30.0
NAME = "served"
_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(\{[^}]*\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)


def make_model(folder: Path, size: Size) -> None:
    """Write a model of random weights that reads and draws printable letters, each a token."""
    tokenizer = CharTokenizer(LETTERS)
    config = named(size, tokenizer.vocab_size, CONTEXT)
    vector = rng.stream(0, "weights").standard_normal(num_parameters(config), np.float32) * 0.02
    write_folder(folder, config, torch.from_numpy(vector), tokenizer.to_json(), stop_id=tokenizer.end_of_text)


class Served(AbstractContextManager["Served"]):
    """The process, in a home of its own.

    Args:
        folder: where the home comes to lie, and what it says.
        keys: limits of each key, by its name.
        options: more of `weft serve`.
    """

    def __init__(
        self, folder: Path, model: Path, keys: Mapping[str, Mapping[str, object]], options: Sequence[str] = ()
    ) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        made = {name: new_key(name, **limits) for name, limits in keys.items()}
        self.secrets = {name: secret for name, (secret, _) in made.items()}
        save_keys(self.home / "serve.keys", [key for _, key in made.values()])
        self.printed, self.said = folder / "printed", folder / "said"
        words = ["serve", str(model), "--name", NAME, "--port", "0", "--keys", str(self.home / "serve.keys"), *options]
        with self.printed.open("wb") as printed, self.said.open("wb") as said:
            command = [sys.executable, "-P", "-m", "weft", "--home", str(self.home), *words]
            self.process = subprocess.Popen(command, cwd=folder, stdout=printed, stderr=said)
        self._name = next(iter(keys))

    def __enter__(self) -> "Served":
        try:
            self.host, self.port = self._listens()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Tell it to end, and wait."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listens(self) -> tuple[str, int]:
        deadline = time.monotonic() + START_S
        while not (line := self.printed.read_text()).endswith("\n"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not serve: {self.said.read_text()[-2000:]}")
            time.sleep(0.1)
        found = re.fullmatch(r"http://([\d.]+):(\d+)/", line.strip())
        assert found is not None, line
        return found[1], int(found[2])

    def get(self, path: str) -> bytes:
        line = http.client.HTTPConnection(self.host, self.port, timeout=ASK_S)
        try:
            line.request("GET", path, headers={"authorization": f"Bearer {self.secrets[self._name]}"})
            reply = line.getresponse()
            body = reply.read()
            if reply.status != 200:
                raise RuntimeError(f"GET {path}: {reply.status} {body.decode()}")
            return body
        finally:
            line.close()

    def metrics(self) -> dict[str, float]:
        """Return its figures by name and labels; those of a name with labels also by the name alone, added up."""
        found = dict[str, float]()
        for name, labels, value in _LINE.findall(self.get("/metrics").decode()):
            found[name] = found.get(name, 0.0) + float(value)
            if labels:
                found[name + labels] = float(value)
        return found

    def nbytes(self) -> int:
        """Return what it holds of the memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss)
