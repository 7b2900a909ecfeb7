"""A trained model as the verbs that use one want it: config, parameters, tokenizer, ready on a device.

It comes from a checkpoint of a run or from a Hugging Face folder. It imports torch: verbs import it when they run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from msgspec import UNSET
from torch import Tensor

from weft.chat.packing import noon
from weft.cli.home import CHECKPOINT_FILE, find_checkpoint, trained_at
from weft.cli.settings import check_option
from weft.clock import SystemClock
from weft.compose.member import MEMBER, read_member, require_causal, require_weights
from weft.config import from_tree
from weft.dashboard import figures
from weft.data.corpus import USUAL_DATE
from weft.data.tokenizer import JsonTokenizer, Tokenizer, check_vocabulary, from_bytes
from weft.errors import CheckpointError, ConfigError, TokenizerMismatch, WireError
from weft.ids import Digest, short
from weft.model.came_with import CameWith, decode, read
from weft.model.config import ModelConfig, check_size, num_parameters, plain
from weft.model.flat import assemble
from weft.model.peft import merged, write_adapter
from weft.model.transformer import Transformer
from weft.model.weights import FileDtype, read_config, read_folder, write_folder
from weft.peer.state.checkpoint import load_came_with, load_model, load_run, load_tokenizer, read_contents
from weft.run.config import RunConfig
from weft.run.frozen import base_of, name_of_base
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.store.chunks import raw
from weft.store.home import Home
from weft.training.device import choose
from weft.wire import digest


class Adapter(NamedTuple):
    """One that was merged into a model.

    Args:
        config: of the model with its adapter.
        base: what names the weights that it goes beside.
    """

    config: ModelConfig
    vector: Tensor
    base: Digest


@dataclass(frozen=True)
class Trained:
    folder: Path
    config: ModelConfig
    vector: Tensor  # flat fp32, on the CPU
    tokenizer: Tokenizer
    run: RunConfig | None  # None: the model was made elsewhere
    round: int | None = None  # None: no checkpoint of weft
    came_with: CameWith = field(default_factory=CameWith)  # chat template, licence and the like, for an export
    adapter: "Adapter | None" = None  # that was merged into it

    @property
    def called(self) -> str:
        """Return what others may call the model: the name of its run, or of its folder."""
        return self.folder.resolve().name if self.run is None else self.run.name

    @property
    def day_s(self) -> float:
        """Return the day that templates are told where the model is measured, in seconds since 1970."""
        return noon(date_of(self.run))

    @property
    def made_at(self) -> float:
        """Return when it was trained last, as far as its folder tells: seconds since 1970."""
        if self.run is None:
            return self.folder.stat().st_mtime
        at, saved_at = trained_at(self.folder)
        return at or saved_at

    def fingerprint(self, kind: str) -> str:
        """Return what names these parameters, held as `kind`: the same with the same seed makes the same text."""
        told = digest(raw(self.vector))[:12]
        return f"{told}-{kind}" if self.round is None else f"{told}-r{self.round}-{kind}"

    def on(self, device: str) -> Transformer:
        """Return the model on `device` ("auto", "cpu", "cuda:1", ...).

        Raises:
            ConfigError: no such device.
        """
        return assemble(self.config, self.vector.to(place(device)))

    def export(
        self, folder: Path, dtype: FileDtype = "float32", on_written: Callable[[int], None] = lambda _nbytes: None
    ) -> None:
        """Write the model as a Hugging Face folder; arguments and errors are those of `write_folder`."""
        write_folder(
            folder,
            self.config,
            self.vector,
            self.tokenizer.to_json(),
            stop_id=self.tokenizer.end_of_text,
            came_with=self.came_with,
            dtype=dtype,
            on_written=on_written,
        )

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter alone, as PEFT has it.

        Raises:
            ConfigError: there is none, or the folder is taken.
            DiskFull: no room.
        """
        if self.adapter is None:
            raise ConfigError(f"{self.folder} has no adapter: the whole model was trained. Leave out --adapter.")
        write_adapter(folder, *self.adapter)

    def export_gguf(
        self, file: Path, dtype: FileDtype = "float32", on_written: Callable[[int], None] = lambda _nbytes: None
    ) -> None:
        """Write the model as a GGUF file; arguments and errors are those of `write_gguf`."""
        from weft.chat.template import sources_of
        from weft.model.gguf import Words, write_gguf

        ids = {"eos_token_id": self.tokenizer.end_of_text, **self.came_with.ids.below(self.config.vocab_size)}
        first = {name: next(iter(id), None) if isinstance(id, list | tuple) else id for name, id in ids.items()}
        words = Words(
            self.called,
            self.tokenizer.to_json(),
            sources_of(self.came_with)[0],
            {name: id for name, id in first.items() if id is not None},
        )
        write_gguf(file, self.config, self.vector, words, dtype=dtype, on_written=on_written)


def place(device: str) -> torch.device:
    """Return the device that a command line names.

    Raises:
        ConfigError: no such device.
    """
    check_option("device", device)
    settings: PeerConfig = from_tree({"device": device}, PeerConfig, where="--device")
    return choose(settings).torch


def open_trained(given: str, home: Path, *, may_denoise: bool = False) -> Trained:
    """Return the model that `given` means (`home.find_checkpoint`), every byte checked.

    Args:
        may_denoise: whether it may be a member that sees all of a text.

    Raises:
        NoSuchRun: none; CheckpointError: half-written or altered.
        ConfigError, DataError: a Hugging Face folder that weft cannot use, or a member whose weights are others, or
            that tells no next token.
    """
    folder = find_checkpoint(given, home)
    if not (folder / CHECKPOINT_FILE).exists():
        check_size(num_parameters(read_config(folder)), PeerConfig().max_parameters)
        config, vector = read_folder(folder)
        if (folder / MEMBER).exists():
            member = read_member(folder)
            require_weights(member, digest(raw(vector)), folder)
            if not may_denoise:
                require_causal(member)
        own = own_tokenizer(folder, config.vocab_size)
        return Trained(folder, config, vector, own, None, came_with=beside(folder, config.vocab_size))
    run, blob, vector = load_model(folder)
    if isinstance(run, StagedConfig) and run.stage is not None:
        raise CheckpointError(
            f"{folder} holds {run.called(run.stage)} of a model in {run.stages} stages, which is not a whole model. "
            "Put the model together: weft gather"
        )
    head = read_contents(folder).head
    round = 0 if head is None else head.round
    config, base, adapter = run.model, base_of(run, Home(home)), None
    if base is not None:
        if config.adapter is not UNSET:
            adapter = Adapter(config, vector, name_of_base(run, base))
        config, vector = plain(config), merged(config, base, vector)
    words, came_with = _kept_tokenizer(folder, blob), kept_beside(folder)
    return Trained(folder, config, vector, words, run, round, came_with=came_with, adapter=adapter)


def open_words(given: str, home: Path) -> tuple[Tokenizer, CameWith]:
    """Return the tokenizer of the model that `given` means, and what came with it; its weights are not read.

    Raises: as `open_trained`.
    """
    folder = find_checkpoint(given, home)
    if (folder / CHECKPOINT_FILE).exists():
        return _kept_tokenizer(folder, load_tokenizer(folder)), kept_beside(folder)
    vocab_size = read_config(folder).vocab_size
    return own_tokenizer(folder, vocab_size), beside(folder, vocab_size)


def date_of(run: RunConfig | None) -> str:
    """Return the day that the templates of a run's model are told: as in training. None: as a run that names no day."""
    rows = UNSET if run is None else run.data.rows
    return USUAL_DATE if rows is UNSET else rows.date


def open_day(given: str, home: Path) -> float:
    """Return the day that templates of the model that `given` means are told, in seconds since 1970.

    Raises: as `open_trained`.
    """
    folder = find_checkpoint(given, home)
    return noon(date_of(load_run(folder) if (folder / CHECKPOINT_FILE).exists() else None))


def own_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    own = JsonTokenizer.from_file(folder)
    try:
        check_vocabulary(own, vocab_size)
    except TokenizerMismatch as error:
        raise TokenizerMismatch(f"{folder}: {error}") from None
    return own


def _kept_tokenizer(folder: Path, blob: bytes) -> Tokenizer:
    try:
        return from_bytes(blob)
    except WireError as error:
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be used: {error}. Use another peer's checkpoint."
        ) from None


def beside(folder: Path, vocab_size: int) -> CameWith:
    """Return what else a Hugging Face folder holds that an export hands on; what stays behind is said."""
    return read(folder, folder, vocab_size, lambda text: typer.echo(text, err=True))


def kept_beside(folder: Path) -> CameWith:
    """Return what came with the model of a checkpoint.

    Raises:
        CheckpointError: altered, or nothing that an export may hand on.
    """
    try:
        return decode(load_came_with(folder))
    except WireError as error:
        raise CheckpointError(f"{folder}: {error}. Use another peer's checkpoint.") from None


def say_which(trained: Trained, given: str) -> None:
    """Say on standard error what is read, where `given` leaves it open or nothing has been trained yet."""
    if trained.run is None or trained.round is None:
        return
    if Path(given) != trained.folder:
        at, saved_at = trained_at(trained.folder)
        age_s = SystemClock().wall() - (at or saved_at)
        ago = f"{'trained' if at else 'saved'} {figures.duration(max(0.0, age_s))} ago"
        run = f"{trained.run.name} ({short(trained.run.run)})"
        typer.echo(f"reading run {run}, round {trained.round}, {ago}\n  {trained.folder}", err=True)
    if trained.round == 0:
        typer.echo("round 0: this model is untrained, its weights are random", err=True)
