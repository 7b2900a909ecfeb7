"""A trained model as the verbs that use one want it: config, parameters, tokenizer, ready on a device.

It comes from a checkpoint of a run or from a Hugging Face folder. It imports torch: verbs import it when they run.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from weft.cli.locate import CHECKPOINT_FILE, find_checkpoint
from weft.config import from_tree
from weft.data import JsonTokenizer, Tokenizer
from weft.data.tokenizer import from_bytes
from weft.errors import CheckpointError, WireError
from weft.model import ModelConfig, Transformer, assemble, check_bounds, read_config, read_folder
from weft.peer.checkpoint import load_model
from weft.peer.config import PeerConfig, RunConfig
from weft.peer.device import choose


@dataclass(frozen=True)
class Trained:
    folder: Path
    config: ModelConfig
    vector: Tensor  # flat fp32, on the CPU
    tokenizer: Tokenizer
    run: RunConfig | None  # None: the model was made elsewhere

    def on(self, device: str) -> Transformer:
        """Return the model on `device` ("auto", "cpu", "cuda:1", ...).

        Raises:
            ConfigError: no such device.
        """
        settings: PeerConfig = from_tree({"device": device}, PeerConfig, where="--device")
        return assemble(self.config, self.vector.to(choose(settings).torch))


def open_trained(given: str, home: Path) -> Trained:
    """Return the model that `given` means (see `locate`), every byte checked.

    Raises:
        CheckpointError: none, half-written or altered.
        ConfigError, DataError: a Hugging Face folder that weft cannot use.
    """
    folder = find_checkpoint(given, home)
    if not (folder / CHECKPOINT_FILE).exists():
        check_bounds(read_config(folder), PeerConfig().max_parameters)
        config, vector = read_folder(folder)
        return Trained(folder, config, vector, JsonTokenizer.from_file(folder), None)
    run, blob, vector = load_model(folder)
    try:
        return Trained(folder, run.model, vector, from_bytes(blob), run)
    except WireError as error:
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be used: {error}. Use another peer's checkpoint."
        ) from None
