"""Code from outside of weft that a run may name: the owner of this machine gives its file, and the home keeps the text.

Nobody is sent it, and none is taken from anybody: what is kept here, this machine's owner has given before.
"""

from collections.abc import Iterator
from pathlib import Path

from weft.data.store import PRIVATE, write_atomically
from weft.errors import ConfigError, DataError, DiskFull
from weft.events import Emit, Notice
from weft.extension import ExtensionConfig, knows, learn_from, text_of
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
        path = Path(name)
        text = text_of(path)
        for known in learn_from(path, text):
            emit(Notice(text=f"{path.name} is known here as {known.name}, its text as {known.source}"))
            if digest(text.encode()) != known.source:  # it is of another file: of a package that is installed
                continue
            try:
                write_atomically(_kept(options.home, known.source), [text.encode()], mode=PRIVATE)
            except (DiskFull, DataError) as error:
                emit(Notice(text=f"{path.name} is not kept, so give it again at the next start: {error}"))


def recall(run: Genesis, home: Home) -> None:
    """Let this process know what a run names, as far as the owner of this home has given it before.

    Raises:
        ConfigError: what is kept of it was changed, or fails.
    """
    for named in _named(run):
        path = _kept(home, named.source)
        if knows(named) or not path.is_file():
            continue
        text = text_of(path)
        if digest(text.encode()) != named.source:
            raise ConfigError(
                f"{path}: it is not the text that was kept there. Remove it, and give its file again: --code FILE"
            )
        learn_from(path, text)


def _named(run: Genesis) -> Iterator[ExtensionConfig]:
    method, reward = run.method, run.reward if isinstance(run, RunConfig) else None
    judge = reward.judge if isinstance(reward, ExtensionReward) else None
    for each in (method.codec, method.reply_codec, method.apply, judge):
        if isinstance(each, ExtensionConfig):
            yield each


def _kept(home: Home, source: str) -> Path:
    return home.code / f"{source}.py"
