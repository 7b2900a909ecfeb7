"""`weft export`: a checkpoint as a Hugging Face folder for transformers and vLLM, or a GGUF file for llama.cpp."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.home import find_checkpoint, home_of
from weft.cli.terminal import WorkLine, say_loading
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.progress import Meter


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def export(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help='Folder, or a run: its name, its digits, or "last".', show_default=False)
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; with --gguf the file.", show_default=False)],
    dtype: Annotated[Dtype, typer.Option(help="Number format of the tensors.")] = Dtype.float32,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write one file for llama.cpp, Ollama and others instead (pip: weft[gguf]).")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the run's adapter alone, as PEFT loads it, and not the model.")
    ] = False,
) -> None:
    """Write config.json, safetensors, tokenizer.json and what else came with the model, such as its chat template."""
    if target.suffix.lower() == ".gguf" and not gguf:
        raise ConfigError(f"{target} names a GGUF file, and weft export writes a folder. Add --gguf, or name a folder.")
    if adapter and (gguf or dtype is not Dtype.float32):
        raise ConfigError("--adapter writes an adapter in float32. Leave out --gguf and --dtype.")
    folder = find_checkpoint(checkpoint, home_of(context))  # what is not there is said at once
    say_loading()
    from weft.cli.model.trained import open_trained, say_which

    trained = open_trained(str(folder), home_of(context))
    if adapter:
        trained.export_adapter(target)
        say_which(trained, checkpoint)
        typer.echo(str(target))
        typer.echo(f'load it with: peft.PeftModel.from_pretrained(model, "{target}")', err=True)
        return
    nbytes = trained.vector.numel() * (4 if dtype is Dtype.float32 else 2)
    with Meter("writing", "B", WorkLine(), SystemClock(), nbytes) as meter:
        write = trained.export_gguf if gguf else trained.export
        write(target, dtype.value, meter.add)
    say_which(trained, checkpoint)
    typer.echo(str(target))
    call = f"llama-server -m {target}" if gguf else f'transformers.AutoModelForCausalLM.from_pretrained("{target}")'
    typer.echo(f"load it with: {call}", err=True)
