"""Text in domains, from what lies on a machine that runs Python: programs, headers, settings, licences, manuals.

    files(most_nbytes) -> {domain: [files]}             in an order that their paths fix
    text(sizes, scale) -> Text                          the same as documents of one length, apart by what they are for

What there is differs from machine to machine, so a report says how much of each domain it had, and which it had not.
"""

import dataclasses
import gzip
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft import wire
from weft.compose.paths.resharding import apart
from weft.data.tokenizer import Tokenizer, train_bpe

Windows = NDArray[np.int64]

DOMAIN_NBYTES = 1_500_000
BPE_LETTERS = 4000  # of each file: pieces are those of all domains alike
FILE_NBYTES = 48_000  # of one file, at most: no file is a domain
LEAST_NBYTES = 600  # shorter ones are left out
_SYSTEM = Path("/usr")
_SHELL = re.compile(rb"#! ?\S+/(env )?(ba|da|k|z)?sh\b")


@dataclass(frozen=True)
class Domain:
    name: str
    files: Callable[[], Iterator[Path]]


def _below(*folders: Path, ends: tuple[str, ...], without: tuple[str, ...] = ()) -> Iterator[Path]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.name.endswith(ends) and not any(part in without for part in path.parts):
                yield path


def _scripts() -> Iterator[Path]:
    for folder in ("bin", "sbin", "lib", "share"):
        yield from (_SYSTEM / folder).glob("*")
    yield from _below(_SYSTEM / "lib", _SYSTEM / "share", ends=(".sh",))


def _manuals(*, is_english: bool) -> Iterator[Path]:
    for path in (_SYSTEM / "share" / "man").glob("**/*.gz"):
        if path.parent.parent.name == "man" if is_english else path.parent.parent.name != "man":
            yield path


_PACKAGES = Path(sysconfig.get_path("purelib"))
DOMAINS = (
    Domain(
        "python", lambda: _below(Path(sysconfig.get_path("stdlib")), ends=(".py",), without=("site-packages", "test"))
    ),
    Domain("c headers", lambda: _below(_SYSTEM / "include", _PACKAGES, ends=(".h",))),
    Domain("perl", lambda: _below(_SYSTEM / "share", _SYSTEM / "lib", ends=(".pl", ".pm"))),
    Domain("shell", _scripts),
    Domain("json and toml", lambda: _below(_SYSTEM, Path(sys.prefix), ends=(".json", ".toml"))),
    Domain(
        "prose",
        lambda: _below(
            _SYSTEM / "share" / "doc",
            _SYSTEM / "share" / "common-licenses",
            _PACKAGES,
            ends=(".txt", ".md", ".rst", "README", "copyright", "LICENSE", "GPL-3", "Apache-2.0"),
        ),
    ),
    Domain("manuals", lambda: _manuals(is_english=True)),
    Domain("manuals in other languages", lambda: _manuals(is_english=False)),
)


def files(most_nbytes: int) -> dict[str, list[tuple[str, str]]]:
    """Return of each domain that is there its files, each with the digest of its path; no text twice."""
    seen, found = set[str](), dict[str, list[tuple[str, str]]]()
    for domain in DOMAINS:
        texts, total = list[tuple[str, str]](), 0
        paths = {wire.digest(str(path).encode()): path for path in domain.files()}
        for name in sorted(paths):
            if total >= most_nbytes:
                break
            text = _text(paths[name], is_script=domain.name == "shell")
            if len(text) >= LEAST_NBYTES and (digest := wire.digest(text.encode())) not in seen:
                seen.add(digest)
                texts.append((name, text))
                total += len(text.encode())
        if texts:
            found[domain.name] = texts
    return found


def _text(path: Path, *, is_script: bool) -> str:
    """Return the beginning of a file; empty: it cannot be read, or is no text."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(FILE_NBYTES)
    except (OSError, EOFError):
        return ""
    if is_script and not _SHELL.match(data):
        return ""
    try:
        return data[: data.rfind(b"\n") + 1].decode()
    except UnicodeDecodeError:
        return ""


# --- as documents ---


@dataclass(frozen=True)
class Sizes:
    """
    Args:
        num_held_out: documents of each domain; num_router: in all, that a router learns from.
    """

    vocab_size: int
    seq_len: int
    num_held_out: int
    num_router: int
    seed: int

    def scaled(self, scale: float) -> "Sizes":
        """Return a few documents less; enough for a trial."""
        fewer = {name: max(4, round(scale * getattr(self, name))) for name in ("num_held_out", "num_router")}
        return dataclasses.replace(self, **fewer)


@dataclass(frozen=True)
class Text:
    """Documents: windows of one length, each with the word after it. Of a file there are several.

    Args:
        train, router, validation: of all domains, mixed; held_out: by domain, of other files.
        held_out_files: of each held-out document which file it is of, by number; no two domains have one in common.
        domains: of each document of `train`, by number.
    """

    train: Windows
    domains: NDArray[np.int64]
    router: Windows
    validation: Windows
    held_out: dict[str, Windows]
    held_out_files: dict[str, NDArray[np.int64]]
    names: tuple[str, ...]
    nbytes: dict[str, int]
    token_nbytes: float
    digest: str


def text(sizes: Sizes, scale: float = 1.0) -> Text:
    """Return this machine's text as documents. A file is held out, or it is not: no document has the next's beginning.

    Args:
        scale: of the bytes of each domain, down to a twentieth.
    """
    found = files(int(DOMAIN_NBYTES * max(scale, 0.05)))
    trained = {name: [file for digest, file in each if not _is_held_out(digest)] for name, each in found.items()}
    others = {name: [file for digest, file in each if _is_held_out(digest)] for name, each in found.items()}
    tokenizer = train_bpe((file[:BPE_LETTERS] for each in trained.values() for file in each), sizes.vocab_size)
    windows = {name: _windows(tokenizer, each, sizes.seq_len)[0] for name, each in trained.items()}
    held_out, held_out_files, num_files = dict[str, Windows](), dict[str, NDArray[np.int64]](), 0
    for name, each in others.items():
        held_out[name], places = _windows(tokenizer, each, sizes.seq_len)
        held_out_files[name] = num_files + places
        num_files += len(each)
    names = tuple(name for name in found if len(windows[name]) and len(held_out[name]))
    everything = np.concatenate([windows[name] for name in names])
    domains = np.repeat(np.arange(len(names)), [len(windows[name]) for name in names])
    router, rest = apart(len(everything), min(0.05, sizes.num_router / len(everything)), sizes.seed)
    place, left = apart(len(rest), 0.05, sizes.seed + 1)
    sample = [file for each in trained.values() for file in each[::20]]
    return Text(
        train=everything[rest[left]],
        domains=domains[rest[left]],
        router=everything[router],
        validation=everything[rest[place]],
        held_out={name: _spread(held_out[name], sizes.num_held_out) for name in names},
        held_out_files={name: _spread(held_out_files[name], sizes.num_held_out) for name in names},
        names=names,
        nbytes={name: sum(len(file.encode()) for _, file in each) for name, each in found.items()},
        token_nbytes=len("".join(sample).encode()) / sum(len(tokenizer.encode(file)) for file in sample),
        digest=wire.digest(b"".join(each[name].tobytes() for name in names for each in (windows, held_out))),
    )


def _is_held_out(digest: str) -> bool:
    return int(digest[:4], 16) % 8 == 0


def _spread(documents: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Return so many documents, from all over, or all where there are fewer."""
    return documents[:: max(1, len(documents) // num)][:num]


def _windows(tokenizer: Tokenizer, files: Sequence[str], seq_len: int) -> tuple[Windows, NDArray[np.int64]]:
    """Return the documents of files, one after the other, and of each which of these files it is of."""
    found = [np.empty((0, seq_len + 1), dtype=np.int64)]
    for file in files:
        ids = tokenizer.encode(file).astype(np.int64)
        found.append(ids[: len(ids) // (seq_len + 1) * (seq_len + 1)].reshape(-1, seq_len + 1))
    return np.concatenate(found), np.repeat(np.arange(len(files)), [len(each) for each in found[1:]])
