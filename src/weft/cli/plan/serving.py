"""From the words of `weft plan --serve` to what answers take: of a run file, of a checkpoint, of a Hugging Face folder.

Of a model that is there nothing but its shape is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from weft.cli import settings
from weft.cli.home import CHECKPOINT_FILE, find_checkpoint
from weft.cli.options import Numbers, kind_on
from weft.cli.plan import serve_here
from weft.cli.plan.question import Asked, Named, model_of
from weft.engine.graphs import held_nbytes
from weft.engine.load import free_nbytes, plan, weights_nbytes
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.engine.step import page_nbytes
from weft.errors import TooLarge
from weft.model.config import ModelConfig, check_size, num_parameters, plain
from weft.model.sections import sections
from weft.model.weights import read_config
from weft.peer.state.checkpoint import load_run
from weft.pipeline.config import PipelineConfig
from weft.plan import serve
from weft.plan.cut import planned
from weft.plan.serve import Speed, Timed
from weft.plan.split import Link
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.texts.section import codec_of, kind_with
from weft.training.device import choose
from weft.training.text_memory import LOG_SHARE

BATCHES = (1, 8, 32)  # texts at a time
PROMPTS = (128, 1024)  # tokens
LENGTHS = (512, 2048)  # of texts


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is to answer, and in how many stages."""

    name: str
    config: ModelConfig
    num_stages: int
    pipeline: PipelineConfig
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Room:
    """Pages of keys and values, as far as memory goes.

    Args:
        texts: so many of each length.
        graphs_nbytes: that CUDA graphs come to hold beside; 0 without a GPU.
    """

    free_nbytes: int
    num_pages: int
    kv_nbytes: int
    texts: Mapping[int, int]
    graphs_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The same model by members of its stages, one of each.

    Args:
        row_nbytes: of a token, from each stage to the next.
        weights_nbytes, page_nbytes: of the stage that has most.
        tokens_per_gb: that a member holds for each GB of its `serve_nbytes`.
    """

    num_stages: int
    link: Link
    row_nbytes: int
    weights_nbytes: int
    page_nbytes: int
    tokens_per_gb: int
    speeds: Mapping[int, tuple[Speed, ...]]
    first_token_s: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What it costs to answer while training.

    Args:
        training: tokens a second of all peers, without and with it.
        speeds: by the share alone.
    """

    share: float
    training: tuple[float, float]
    speeds: Mapping[int, tuple[Speed, ...]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """
    Args:
        weights_nbytes: by kind of numbers.
        room: None: the model does not fit into this machine; `objection` says why.
        speeds, first_token_s: by tokens of the prompt.
    """

    model: Model
    machine: str
    timed: Timed
    weights_nbytes: Mapping[Kind, int]
    page_nbytes: int
    room: Room | None
    objection: str
    speeds: Mapping[int, tuple[Speed, ...]]
    first_token_s: Mapping[int, float]
    ring: Ring | None = None
    share: Share | None = None


def of_run_file(path: Path, changes: Sequence[str], home: Path) -> Model:
    """
    Args:
        home: where members lie by name.

    Raises:
        ConfigError, DataError: the file, or a change of it, makes no sense.
    """
    run_file = settings.run_file(path, changes, is_final=False)
    if run_file.stages == 1:  # of others `question.run` says what has no effect
        run_file = settings.run_file(path, changes)
    config, notes = model_of(run_file, path.absolute().parent, home)
    return Model(
        name=run_file.name, config=plain(config), num_stages=run_file.stages, pipeline=run_file.pipeline, notes=notes
    )


def of_trained(given: str, home: Path, num_stages: int | None) -> Model:
    """
    Args:
        given: as `weft serve` takes it.
        num_stages: None: as its run has them.

    Raises:
        CheckpointError, ConfigError, TooLarge: there is no such model, or none that can be used.
    """
    folder = find_checkpoint(given, home)
    if not (folder / CHECKPOINT_FILE).exists():
        config = read_config(folder)
        check_size(num_parameters(config), PeerConfig().max_parameters)
        name, own, pipeline = folder.resolve().name, 1, PipelineConfig()
    else:
        run = load_run(folder)
        name, config, own, pipeline = run.name, run.model, 1, PipelineConfig()
        if isinstance(run, StagedConfig):
            own, pipeline = run.stages, run.pipeline
    return Model(name=name, config=plain(config), num_stages=num_stages or own, pipeline=pipeline)


def answer(model: Model, numbers: Numbers, line: Named) -> Answer:
    """Time this machine, and return what answers take.

    Raises:
        ConfigError: numbers that this device does not compute, or more stages than layers.
        TooLarge: there is no memory for a layer.
    """
    config, device = model.config, choose(PeerConfig()).torch
    cuts = sections(config, model.num_stages)
    codec = codec_of(model.pipeline.activations)
    kind = kind_on(device, numbers) if model.num_stages == 1 else kind_with(codec, device)
    free = free_nbytes(device)
    found = serve_here.measure(config, kind, device)
    room, objection = None, ""
    try:
        room = _room(config, device, kind, free)
    except TooLarge as error:
        objection = str(error)
    (whole,) = serve.stages_of(config, kind)
    prompts = prompts_of(config)
    told = Answer(
        model=model,
        machine=found.name,
        timed=found.timed,
        weights_nbytes={each: weights_nbytes(config, each) for each in get_args(Kind)},
        page_nbytes=page_nbytes(config, kind),
        room=room,
        objection=objection,
        speeds={num: tuple(serve.speed(found.timed, whole, each, num) for each in BATCHES) for num in prompts},
        first_token_s={num: serve.first_token_s(found.timed, whole, num) for num in prompts},
    )
    if model.num_stages == 1:
        return told
    link = Link(min(line.line.up_bps, line.line.down_bps), 4 * line.line.delay_s)
    row_nbytes = codec.nbytes(config.width)
    stages = serve.stages_of(config, kind, model.num_stages)
    most = max(page_nbytes(config, kind, len(cut.layers)) for cut in cuts)
    ring = Ring(
        num_stages=model.num_stages,
        link=link,
        row_nbytes=row_nbytes,
        weights_nbytes=max(weights_nbytes(config, kind, cut) for cut in cuts),
        page_nbytes=most,
        tokens_per_gb=int((1 - LOG_SHARE) * 1e9) // most * PAGE,
        speeds=_ring_speeds(told, link, row_nbytes, 1.0),
        first_token_s={num: serve.ring_first_token_s(found.timed, stages, link, row_nbytes, num) for num in prompts},
    )
    return replace(told, ring=ring)


def with_share(told: Answer, asked: Asked, share: float) -> Answer:
    """Return the same with what a share of each device takes from training's tokens a second.

    A machine that answers for a share of the time trains for the rest: as one that is slower by so much.

    Raises:
        ConfigError, TooLarge: as `plan.cut.planned`.
    """
    assert told.ring is not None
    question = asked.question
    slower = tuple(replace(each, tokens_per_s=(1 - share) * each.tokens_per_s) for each in question.machines)
    alone, beside = (
        planned(each, asked.pipeline, asked.stages).tokens_per_s
        for each in (question, replace(question, machines=slower))
    )
    speeds = _ring_speeds(told, told.ring.link, told.ring.row_nbytes, share)
    return replace(told, share=Share(share=share, training=(alone, beside), speeds=speeds))


def _ring_speeds(told: Answer, link: Link, row_nbytes: int, share: float) -> dict[int, tuple[Speed, ...]]:
    stages = serve.stages_of(told.model.config, told.timed.kind, told.model.num_stages)
    return {
        num: tuple(serve.ring_speed(told.timed, stages, link, row_nbytes, each, num, share) for each in BATCHES)
        for num in told.speeds
    }


def _room(config: ModelConfig, device: torch.device, kind: Kind, free: int) -> Room:
    context = config.max_seq_len
    held = plan(config, device, kind, context, None, free)
    lengths = sorted({*(each for each in LENGTHS if each < context), context})
    return Room(
        free_nbytes=free,
        num_pages=held.num_pages,
        kv_nbytes=held.kv_nbytes,
        texts={each: held.num_pages // num_pages(each) for each in lengths},
        graphs_nbytes=_graphs_nbytes(config, device, kind, held.num_pages),
    )


def _graphs_nbytes(config: ModelConfig, device: torch.device, kind: Kind, num_pages: int) -> int:
    return held_nbytes(config, kind, config.max_seq_len, num_pages) if device.type == "cuda" else 0


def prompts_of(config: ModelConfig) -> tuple[int, ...]:
    """Return the prompts that are told of: those that leave a model room for an answer, or half of what it reads."""
    found = tuple(each for each in PROMPTS if each < config.max_seq_len)
    return found or (max(1, config.max_seq_len // 2),)


def tree(told: Answer) -> dict[str, Any]:
    """Return everything for a program: seconds, bytes, tokens a second."""

    def spelled(speeds: Mapping[int, tuple[Speed, ...]]) -> list[dict[str, Any]]:
        return [
            {"prompt": prompt, "num_texts": each.num_texts, "tokens_per_s": each.tokens_per_s, "bound": each.bound}
            for prompt, some in speeds.items()
            for each in some
        ]

    def first(seconds: Mapping[int, float]) -> dict[str, float]:
        return {str(prompt): took_s for prompt, took_s in seconds.items()}

    ring, share, timed = told.ring, told.share, told.timed
    return {
        "name": told.model.name,
        "num_parameters": num_parameters(told.model.config),
        "machine": told.machine,
        "numbers": timed.kind,
        "bandwidth": timed.bandwidth,
        "rates": timed.rates,
        "weights_nbytes": told.weights_nbytes,
        "page_tokens": PAGE,
        "page_nbytes": told.page_nbytes,
        "room": told.room
        and {**_fields(told.room), "texts": {str(each): num for each, num in told.room.texts.items()}},
        "objection": told.objection or None,
        "speeds": spelled(told.speeds),
        "first_token_s": first(told.first_token_s),
        "ring": ring
        and {
            **_fields(ring),
            "link": {"bps": ring.link.bps, "rtt_s": ring.link.rtt_s},
            "speeds": spelled(ring.speeds),
            "first_token_s": first(ring.first_token_s),
        },
        "share": share and {**_fields(share), "speeds": spelled(share.speeds)},
        "notes": told.model.notes,
    }


def _fields(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__dataclass_fields__}
