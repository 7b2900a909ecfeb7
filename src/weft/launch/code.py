"""Code from outside of weft that a run may name: the owner of this machine gives its file, and the home keeps the text.

Nobody is sent it, and none is taken from anybody: what is kept here, this machine's owner has given before.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from weft.data.store import PRIVATE, write_atomically
from weft.errors import DataError, DiskFull
from weft.events import Emit, Notice
from weft.extension import ExtensionConfig, knows, learn_from
from weft.launch.session import Options
from weft.run.config import Genesis, RunConfig
from weft.run.reward import ExtensionReward
from weft.store.home import Home
from weft.wire import digest


def learn(options: Options, emit: Emit) -> None:
    """Let this process know what the machine's settings name.

    Raises:
        ConfigError: a file is not there, or fails.
    """
    for name in options.settings.code:
        path, learnt = Path(name), learn_from(Path(name))
        text = path.read_text(encoding="utf-8").encode()
        for known in learnt:
            if digest(text) == known.source:  # else it is of another file: of a package that is installed
                with suppress(DiskFull, DataError):  # it has to be given again, then
                    write_atomically(_kept(options.home, known.source), [text], mode=PRIVATE)
            emit(Notice(text=f"{path.name} is known here as {known.name}, its text as {known.source}"))


def recall(run: Genesis, home: Home) -> None:
    """Let this process know what a run names, as far as the owner of this home has given it before.

    Raises:
        ConfigError: what is kept of it fails.
    """
    for named in _named(run):
        path = _kept(home, named.source)
        if not knows(named) and path.is_file():
            learn_from(path)


def _named(run: Genesis) -> Iterator[ExtensionConfig]:
    method, reward = run.method, run.reward if isinstance(run, RunConfig) else None
    judge = reward.judge if isinstance(reward, ExtensionReward) else None
    for each in (method.codec, method.reply_codec, method.apply, judge):
        if isinstance(each, ExtensionConfig):
            yield each


def _kept(home: Home, source: str) -> Path:
    return home.code / f"{source}.py"
