"""A model that this machine puts into memory to be asked: on which device, in which numbers, with how much context."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import Numbers, kind_on
from weft.errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from weft.cli.model.trained import Trained
    from weft.engine.load import Plan
    from weft.engine.numbers import Kind
    from weft.serve.generation import Model
    from weft.serve.keys import KeysOfFile
    from weft.serve.metrics import Metrics


@dataclass(frozen=True)
class How:
    """How this machine computes."""

    device: Annotated[str, typer.Option(help="Where torch runs: auto, cpu, cuda, cuda:1.")] = "auto"
    threads: Annotated[int, typer.Option(help="Threads of torch on the CPU; 0: its own choice.", min=0, max=1024)] = 0
    numbers: Annotated[
        Numbers,
        typer.Option(
            help="How weights are held: int8 is the fastest on newer CPUs, w8a16 on older ones, bf16 on GPUs; fp32 is "
            "as trained. Default: the fastest. With exact a text is the same to the bit on every machine, whatever "
            "else is computed beside it."
        ),
    ] = Numbers.auto
    max_context: Annotated[
        int, typer.Option(help="Tokens of question and answer together; 0: as many as the model reads.", min=0)
    ] = 0
    cache: Annotated[
        str | None, typer.Option(help="Memory for keys and values: 2GB. Default: a quarter of what is free.")
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            help="Smaller model with the same tokenizer, a folder or a run: it guesses what comes next, several tokens "
            "at a time. The text is the same.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be asked."""

    model: "Model"
    planned: "Plan"
    metrics: "Metrics"
    models: "Mapping[str, Model]"
    beside: str = ""  # what is said after the size of the weights

    def app(self, keys: "KeysOfFile | None") -> "Starlette":
        from weft.serve.app import app
        from weft.web.web import page_routes

        return app(self.models, keys, metrics=self.metrics, page=page_routes("serve"))


def load(trained: "Trained", name: str, how: How, cache_nbytes: int | None, draft: "Trained | None" = None) -> Loaded:
    """Put a model on this machine, and a draft model beside it.

    Raises:
        ConfigError: no such device, more context than the model reads, or a draft model of another tokenizer.
        TooLarge: no room.
    """
    from weft.cli.model.trained import place
    from weft.data.tokenizer import has_same_tokens
    from weft.engine.load import DraftModel, engine_of, free_nbytes, kind_alone, plan
    from weft.serve.generation import model_of
    from weft.serve.metrics import Metrics

    here, kind = place(how.device), prepared(how)
    context = context_of(how, trained.config.max_seq_len)
    guessing: DraftModel | None = None
    if draft is not None:
        if not has_same_tokens(trained.tokenizer, draft.tokenizer):
            raise ConfigError(
                f"--draft {how.draft}: its tokens are not those of {name}, so its guesses would mean something else. "
                "Give a smaller model of the same family, or leave it out."
            )
        guessing = DraftModel(draft.config, draft.vector, kind_alone(here))
    beside = None if guessing is None else guessing.beside
    planned = plan(trained.config, here, kind, context, cache_nbytes, free_nbytes(here), beside)
    models: dict[str, Model] = {}
    metrics = Metrics(models)
    engine = engine_of(trained.config, trained.vector, here, planned, context, metrics.step(name), draft=guessing)
    try:
        models[name] = model_of(
            name, int(trained.made_at), engine, trained.tokenizer, trained.came_with, trained.fingerprint(kind)
        )
    except BaseException:
        engine.close()
        raise
    said = f" with those of {draft.called}, which guesses" if draft else ""
    return Loaded(models[name], planned, metrics, models, said)


def prepared(how: How) -> "Kind":
    """Set torch up as is asked for; return the numbers that models are held in.

    Raises:
        ConfigError: no such device, or it does not compute them.
    """
    import torch

    from weft.cli.model.trained import place

    if how.threads:
        torch.set_num_threads(how.threads)
    return kind_on(place(how.device), how.numbers)


def context_of(how: How, most: int) -> int:
    """
    Raises:
        ConfigError: more is asked for than the model reads.
    """
    if how.max_context > most:
        raise ConfigError(f"--max-context {how.max_context}: the model reads {most} tokens at most.")
    return how.max_context or most
