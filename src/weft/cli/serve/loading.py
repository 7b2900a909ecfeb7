"""Models that this machine puts into memory to be asked: on which device, in which numbers, with how much context.

    MODEL ──open──► Opened: what it takes ─┐
    MODEL ──open──► Opened ────────────────┴─► what is planned for all together ──► an engine each ──► Loaded

Engines take turns at the device, so a model is slowed down by the others, and never kept waiting for longer than a step
of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import Numbers, kind_on, nbytes
from weft.errors import ConfigError
from weft.ids import several

if TYPE_CHECKING:
    import torch
    from starlette.applications import Starlette

    from weft.cli.model.trained import Trained
    from weft.data.tokenizer import Tokenizer
    from weft.engine.engine import Serves, Turns
    from weft.engine.load import Needs, Plan
    from weft.engine.numbers import Kind
    from weft.model.came_with import CameWith
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
        str | None,
        typer.Option(
            help="Memory for keys and values, of all models together: 2GB. Default: a quarter of what is free."
        ),
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


OnStep = Callable[[int, int, float], None]  # as of an `Engine`


@dataclass(frozen=True)
class Here:
    """This machine, as it is to compute.

    Args:
        kind: numbers that models are held in.
        max_context: 0: as many tokens as a model reads.
        cache_nbytes: for keys and values of all models; None: a share of what is free.
    """

    device: "torch.device"
    kind: "Kind"
    max_context: int
    cache_nbytes: int | None

    def context(self, most: int, name: str) -> int:
        """Return how many tokens question and answer may have together, of a model that reads `most`.

        Raises:
            ConfigError: more is asked for.
        """
        if self.max_context > most:
            raise ConfigError(f"--max-context {self.max_context}: {name} reads {most} tokens at most. Choose less.")
        return self.max_context or most


@dataclass(frozen=True)
class Opened:
    """A model that was read, and is not yet where it answers from.

    Args:
        engine: returns what serves it, with what is planned for it.
        made_at: seconds since 1970.
        fingerprint: as of a `Model`.
        beside: what is said after the size of its weights.
    """

    name: str
    needs: "Needs"
    engine: "Callable[[Plan, OnStep, Turns], Serves]"
    words: "Tokenizer"
    came_with: "CameWith"
    made_at: int
    fingerprint: str
    beside: str = ""


@dataclass(frozen=True)
class Loaded:
    """Models that are ready to be asked, by their names; the first is taken where a request need name none.

    Args:
        plans: of each, in the same order.
        beside: what is said after the size of the weights of each.
    """

    models: "Mapping[str, Model]"
    plans: "Sequence[Plan]"
    beside: Sequence[str]
    metrics: "Metrics"

    def app(self, keys: "KeysOfFile | None") -> "Starlette":
        from weft.serve.app import app
        from weft.web.web import page_routes

        return app(self.models, keys, metrics=self.metrics, page=page_routes("serve"))

    def close(self) -> None:
        """End all texts."""
        from weft.engine.engine import close_all

        close_all([model.engine for model in self.models.values()])


def named(num_models: int, names: Sequence[str]) -> Sequence[str]:
    """Return what each model is to be called; "": as it is called by itself.

    Raises:
        ConfigError: so many names are not for so many models, or two of them are the same.
    """
    if names and len(names) != num_models:
        raise ConfigError(
            f"--name: {several(len(names), 'name')}, and {several(num_models, 'model')} would have them. Name the "
            "models, and give --name as often, in the same order; or leave it out."
        )
    if all(names):
        require_apart(names)
    return names or [""] * num_models


def require_apart(names: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: two models are called alike; says how to name them.
    """
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        apart = " ".join(f"--name {name}{f'-{number}' * (name == twice)}" for number, name in enumerate(names, 1))
        raise ConfigError(
            f"two models are called {twice}, and a request could mean either. Name each, in their order: {apart}"
        )


def prepared(how: How) -> Here:
    """Set torch up as is asked for.

    Raises:
        ConfigError: no such device, or it does not compute such numbers; or the cache is no number of bytes.
    """
    cache_nbytes = nbytes("--cache", how.cache)
    import torch

    from weft.cli.model.trained import place

    if how.threads:
        torch.set_num_threads(how.threads)
    device = place(how.device)
    return Here(device, kind_on(device, how.numbers), how.max_context, cache_nbytes)


def open_model(trained: "Trained", name: str, here: Here, draft: "Trained | None" = None) -> Opened:
    """Return a single model, with a draft model beside it.

    Raises:
        ConfigError: more context than the model reads, or a draft model of another tokenizer.
    """
    from weft.data.tokenizer import has_same_tokens
    from weft.engine.load import DraftModel, engine_of, kind_alone, needs

    context = here.context(trained.config.max_seq_len, name)
    guessing: DraftModel | None = None
    if draft is not None:
        if not has_same_tokens(trained.tokenizer, draft.tokenizer):
            raise ConfigError(
                f"--draft {draft.called}: its tokens are not those of {name}, so its guesses would mean something "
                "else. Give a smaller model of the same family, or leave it out."
            )
        guessing = DraftModel(draft.config, draft.vector, kind_alone(here.device))
    return Opened(
        name,
        needs(trained.config, here.kind, context, None if guessing is None else guessing.beside),
        lambda planned, on_step, turns: engine_of(
            trained.config, trained.vector, here.device, planned, context, on_step, draft=guessing, turns=turns
        ),
        trained.tokenizer,
        trained.came_with,
        int(trained.made_at),
        trained.fingerprint(here.kind),
        f" with those of {draft.called}, which guesses" if draft else "",
    )


def load(opened: Sequence[Opened], here: Here) -> Loaded:
    """Put models on this machine.

    Raises:
        ConfigError: two are called alike; or `--cache` does not hold a text of each.
        TooLarge: no room.
    """
    from weft.engine.engine import Turns
    from weft.engine.load import free_nbytes, plan_together
    from weft.serve.generation import Model, model_of
    from weft.serve.metrics import Metrics

    require_apart([each.name for each in opened])
    needs = [each.needs for each in opened]
    plans = plan_together(needs, here.device, here.cache_nbytes, free_nbytes(here.device))
    models: dict[str, Model] = {}
    metrics, turns = Metrics(models), Turns()
    loaded = Loaded(models, plans, [each.beside for each in opened], metrics)
    try:
        for each, planned in zip(opened, plans, strict=True):
            engine = each.engine(planned, metrics.step(each.name), turns)
            try:
                models[each.name] = model_of(
                    each.name, each.made_at, engine, each.words, each.came_with, each.fingerprint
                )
            except BaseException:
                engine.close()
                raise
    except BaseException:
        loaded.close()
        raise
    return loaded
