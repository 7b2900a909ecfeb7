"""From the words of `weft plan` to the question that is asked: a run, machines, lines, prices.

Nothing is packed: of a run's data only its tokenizer matters, and where that is an alphabet whose text is not here, one
is assumed and said.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.cli import settings
from weft.cli.options import rate_bps
from weft.codec.config import CodecConfig
from weft.config import alike, load
from weft.cost.training import EXACT_TIMES
from weft.dashboard import figures
from weft.data.corpus import text_nbytes
from weft.data.packing import CharactersConfig, make_tokenizer
from weft.data.tokenizer import CharTokenizer
from weft.errors import ConfigError, DataError, TooLarge
from weft.ids import several
from weft.model.config import ModelConfig, num_parameters
from weft.peer.state.checkpoint import load_run, read_contents
from weft.pipeline.config import PipelineConfig
from weft.plan import profiles
from weft.plan.question import Cluster, Machines, Question, cluster_of, tokens_per_s
from weft.plan.timing import Line
from weft.run.amend import amended, corpus_like
from weft.run.config import FolderModel, RunConfig, RunFile, SizedModel
from weft.run.genesis import on_corpus, resolve
from weft.run.idle import without_effect
from weft.run.machine import PeerConfig
from weft.run.trust import FEWEST, AuditedTrust, MembersTrust, is_exact
from weft.sim.scenario import Kind, Scenario
from weft.sync.method.choices import Choices
from weft.sync.method.presets import AutoConfig, MethodConfig, spell_out
from weft.sync.method.schedule import missed

if TYPE_CHECKING:
    from weft.training.device import Device

ASSUMED_CHARACTERS = 100  # of a text that is not here
HERE = "here"
AS_SCENARIO = "as the scenario says"

_CODECS = ("fp32", "bf16", "fp8", "int8", "int4", "e3m0", "int2", "sign")
DRAWN = "training steps alone are reckoned; answers are drawn before each, which takes most of the time"
_METHODS = ("ddp", "powersgd", "fedavg", "diloco", "streaming", "async-diloco", "sparseloco", "demo", "cocktail")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question, and what to say of how it came about.

    Args:
        notes: what was assumed, and where figures come from.
        speed: how fast peers are, and how that is known.
        lines: what connects them.
        text_nbytes: that it trains on; None: that is not known without reading it.
        here: memory that a peer takes on this machine, by place, and samples at a time; None: it is not timed here,
            does not fit, or its text is not here.
        assumed: of the notes, what figures hang on.
        stages: that the run file cuts the model into; `pipeline`: how micro-batches pass through them.
    """

    name: str
    question: Question
    notes: tuple[str, ...]
    stages: int
    pipeline: PipelineConfig
    speed: str = ""
    lines: str = ""
    text_nbytes: int | None = None
    here: tuple[dict[str, int], int] | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """What replaces the run file's method; None: nothing."""

    method: str | None
    every: int | None
    codec: str | None


@dataclass(frozen=True, kw_only=True)
class Own:
    """What one peer has."""

    device: str | None
    tokens_per_s: float | None
    efficiency: float | None
    watts: float | None
    price_per_hour: float
    line: "Named"
    line_name: str = "home"
    home: Path | None = None
    """Where members lie by name that a run may begin as; None: none do."""


@dataclass(frozen=True)
class Prices:
    """What is paid, and what a run is held against; None: as `profiles.toml` has it."""

    per_kwh: float | None
    cluster: str | None
    cluster_size: int | None
    cluster_price: float | None


@dataclass(frozen=True)
class Named:
    """A line and whether all that have it are one machine."""

    line: Line
    is_one_machine: bool
    source: str


def run(path: Path, changes: Sequence[str], peers: int | None, own: Own, method: Method, prices: Prices) -> Asked:
    """Return the question of a run file among peers that are alike.

    Raises:
        WeftError: a file, a name or a figure makes no sense; says which.
    """
    run_file = settings.run_file(path, changes, is_final=method.method is None)
    base = path.absolute().parent
    model, notes = model_of(run_file, base, own.home)
    asked = _alike(run_file, model, peers or run_file.peers, own, method, prices, notes)
    here = _needed(run_file, base, own.home) if own.device == HERE else None
    return replace(asked, text_nbytes=_text_nbytes(run_file, base), here=here)


def kept(folder: Path, peers: int | None, own: Own, method: Method, prices: Prices) -> Asked:
    """Return the question of a run by its checkpoint on this machine, as it was amended, among peers that are alike.

    Args:
        peers: None: as many as are its members.

    Raises:
        CheckpointError: it cannot be read; ConfigError: a name or a figure makes no sense.
    """
    from weft.training.device import choose

    contents, run = read_contents(folder), load_run(folder)
    run = run if contents.charter is None else on_corpus(amended(run, contents.charter))
    num = 1 if contents.head is None else max(1, len(contents.head.members))
    model = FolderModel(path="model") if run.reward else SizedModel()
    # What its maker's file said; of peers as many as it can have said at least.
    told = {"model": model, "data": corpus_like(run), "peers": max(num, FEWEST), "run": None}
    unknown = told | {"reward": run.reward or None}
    asked = _alike(RunFile(**alike(RunFile, run) | unknown), run.model, peers or num, own, method, prices, ())
    text_nbytes = run.data.train_text_nbytes + run.data.heldout_text_nbytes
    here = None
    if own.device == HERE and asked.stages == 1:
        here = _needed_by(run, PeerConfig(), choose(PeerConfig()))
    return replace(asked, text_nbytes=text_nbytes, here=here)


def _alike(
    run_file: RunFile,
    model: ModelConfig,
    num_peers: int,
    own: Own,
    method: Method,
    prices: Prices,
    notes: tuple[str, ...],
) -> Asked:
    machines, more = _machines(own, run_file, model, num_peers)
    asked = _ask(run_file, model, (machines,), method, prices, (*notes, *more))
    if own.tokens_per_s is not None:
        known = "as given"
    else:
        known = "timed on this machine" if own.device == HERE else f"reckoned for {own.device}"
    line, drawn = own.line.line, () if run_file.reward is None else (DRAWN,)
    return replace(
        asked,
        notes=(*asked.notes, *drawn),
        assumed=(*(note for note in asked.notes if note not in more), *drawn),
        speed=f"{machines.tokens_per_s:,.0f} tokens/s by each peer, {known}",
        lines=f"{own.line_name}: {_mbit(line.up_bps)} up, {_mbit(line.down_bps)} down; --line names others",
    )


def _mbit(bps: float) -> str:
    return figures.rate(bps) if math.isfinite(bps) else "no limit"


def _text_nbytes(run_file: RunFile, base: Path) -> int | None:
    with suppress(DataError):
        return text_nbytes(run_file.data.source, base)
    return None


def _needed(run_file: RunFile, base: Path, home: Path | None) -> tuple[dict[str, int], int] | None:
    from weft.training.device import choose

    settings = PeerConfig()
    return needed_here(run_file, base, home, settings, choose(settings))


def needed_here(
    run_file: RunFile, base: Path, home: Path | None, settings: PeerConfig, device: "Device"
) -> tuple[dict[str, int], int] | None:
    """Return the bytes that a peer takes on this machine, by place, and the samples at a time, as `weft train` and
    `weft join` tell them; None: it has stages, its text is not here, or it does not fit."""
    if run_file.stages > 1:
        return None
    from weft.plan.own_text import unsealed

    with suppress(DataError):
        return _needed_by(unsealed(run_file, base, home), settings, device)
    return None


def _needed_by(run: RunConfig, settings: PeerConfig, device: "Device") -> tuple[dict[str, int], int] | None:
    from weft.training.device import check_fits, needed_nbytes

    with suppress(TooLarge):
        micro_batch = check_fits(run, settings, device)
        return needed_nbytes(run, settings, device, micro_batch), micro_batch
    return None


def scenario(
    path: Path, changes: Sequence[str], watts: float, method: Method, prices: Prices, home: Path | None = None
) -> Asked:
    """Return the question of a scenario file: its kinds, as `weft simulate` plays them, without its faults.

    Raises:
        WeftError: a file, a name or a figure makes no sense; says which.
    """
    described = load(path, Scenario)
    run_path = path.parent / described.run
    run_file = settings.run_file(run_path, changes, is_final=method.method is None)
    model, notes = model_of(run_file, run_path.absolute().parent, home)
    machines = tuple(machines_of(kind, watts) for kind in described.kind)
    ignored = []
    if described.fault:
        ignored.append(f"not part of the plan: {several(len(described.fault), 'fault')} of the scenario")
    if any(kind.joins_at_s or kind.joins_over_s for kind in described.kind):
        ignored.append("machines that join later count as there from the start")
    found = _ask(run_file, model, machines, method, prices, (*notes, *ignored))
    kinds = f"{' + '.join(f'{each.count} {each.name}' for each in machines)}, {AS_SCENARIO}"
    nbytes = _text_nbytes(run_file, run_path.absolute().parent)
    return replace(found, text_nbytes=nbytes, assumed=found.notes, speed=kinds, lines=AS_SCENARIO)


def machines_of(kind: Kind, watts: float = 0.0) -> Machines:
    """Return the machines of a scenario's kind, whose processors encode and encrypt in no time."""
    return Machines(
        name=kind.name,
        count=kind.count,
        line=Line(
            up_bps=_bps(kind.up_mbit),
            down_bps=_bps(kind.down_mbit),
            delay_s=kind.delay_ms / 1e3,
            jitter_s=kind.jitter_ms / 1e3,
            loss=kind.loss,
        ),
        tokens_per_s=kind.tokens_per_s,
        watts=watts,
        is_processor_free=True,
    )


def line(name: str, up: str | None, down: str | None, delay: str | None) -> Named:
    """Return the line called `name`, with what is given in place of its own.

    Raises:
        ConfigError: there is none, or a figure is none.
    """
    found, up_bps, down_bps = profiles.line(name), rate_bps("--up", up), rate_bps("--down", down)
    return Named(
        Line(
            up_bps=_bps(found.up_mbit) if up_bps is None else up_bps,
            down_bps=_bps(found.down_mbit) if down_bps is None else down_bps,
            delay_s=found.delay_ms / 1e3 if delay is None else time("--delay", delay),
        ),
        found.is_one_machine,
        found.source,
    )


def time(option: str, text: str) -> float:
    """Return seconds: 10ms, 0.1s; a bare number is milliseconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{option} {text[:40]}: not a time. Write it as 10ms or 0.1s.")
    return float(match[1]) * (1.0 if match[2] == "s" else 1e-3)


def choices(run_file: RunFile, num_peers: int, asked: Method) -> Choices:
    """Return the run file's method, or what is asked for in its place.

    Raises:
        ConfigError: there is no such row or codec, or it takes no inner steps.
    """
    config: MethodConfig = run_file.method
    if asked.method is not None:
        if asked.method not in _METHODS:
            raise ConfigError(f"--method {asked.method[:40]}: no such row. Allowed: {', '.join(_METHODS)}.")
        own_every = getattr(config, "every", None)
        config = msgspec.convert({"type": asked.method}, MethodConfig)
        if own_every and hasattr(config, "every"):
            config = msgspec.structs.replace(config, every=own_every)
    if isinstance(config, AutoConfig) and (asked.every is not None or asked.codec is not None):
        option = "--codec" if asked.every is None else "--every"
        raise ConfigError(
            f"{option} has no effect: auto chooses both as it goes. Leave it out, or give --method diloco."
        )
    if asked.every is not None:
        if not hasattr(config, "every"):
            name = asked.method or str(config.__struct_config__.tag)
            raise ConfigError(f"--every {asked.every}: {name} synchronises after each step. Choose --method diloco.")
        config = msgspec.structs.replace(config, every=asked.every)
    if asked.codec is not None:
        if asked.codec not in _CODECS:
            raise ConfigError(f"--codec {asked.codec[:40]}: no such codec. Allowed: {', '.join(_CODECS)}.")
        codec = msgspec.convert({"type": asked.codec}, CodecConfig)
        config = msgspec.structs.replace(config, codec=codec, reply_codec=None)
    return spell_out(config, num_peers)


def _ask(
    run_file: RunFile,
    model: ModelConfig,
    machines: tuple[Machines, ...],
    method: Method,
    prices: Prices,
    notes: tuple[str, ...],
) -> Asked:
    defaults = profiles.known().defaults
    train, num = run_file.train, sum(each.count for each in machines)
    words = missed(train.schedule, train.tokens, train.batch_size * train.seq_len * num)
    if words is not None and "train.schedule" not in without_effect(run_file):
        notes = (*notes, f"train.tokens is {train.tokens:,}: {words}; change train.schedule, too")
    question = Question(
        model=model,
        train=train,
        choices=choices(run_file, num, method),
        machines=machines,
        cluster=_cluster(prices, run_file, model),
        has_even_leases=run_file.has_even_leases,
        electors=run_file.electors,
        has_reward=run_file.reward is not None,
        trust=run_file.trust or MembersTrust(),
        price_per_kwh=defaults.price_per_kwh if prices.per_kwh is None else prices.per_kwh,
        idle_share=defaults.idle_share,
    )
    if isinstance(question.trust, AuditedTrust) and question.audits is None and run_file.stages == 1:
        why = "with this method"
        if num < FEWEST:
            why = f"where fewer than {FEWEST} are"
        elif num > run_file.electors:
            why = "where more train than vote"
        notes = (*notes, f"no audits are in these figures: members cannot audit each other {why}")
    return Asked(name=run_file.name, question=question, notes=notes, stages=run_file.stages, pipeline=run_file.pipeline)


def _machines(own: Own, run_file: RunFile, model: ModelConfig, num_peers: int) -> tuple[Machines, tuple[str, ...]]:
    defaults, train = profiles.known().defaults, run_file.train
    named, crowding, speed = own.line, 1.0, own.tokens_per_s
    machines = Machines(
        name="peers",
        count=num_peers,
        line=named.line,
        tokens_per_s=speed or 1.0,
        watts=own.watts or 0.0,
        price_per_hour=own.price_per_hour,
    )
    if own.device is None:
        return machines, ("a peer's memory is estimated in fp32, on a CPU",)
    if own.device == HERE:
        from weft.cli.plan.speed_here import hash_s, measure_cut

        num_sharing = num_peers if named.is_one_machine else 1
        stages, micro_batch = run_file.stages, run_file.pipeline.micro_batch
        here = measure_cut(model, train, stages, micro_batch, num_sharing, is_exact=is_exact(run_file.trust))
        crowding, speed = here.crowding, speed or here.tokens_per_s
        note = f"timed here: {here.name}, {speed:,.0f} tokens/s"
        if named.is_one_machine:
            note += f" for each of {several(num_peers, 'peer')} that share this machine"
        machines = replace(machines, tokens_per_s=speed, memory_nbytes=here.memory_nbytes, is_gpu=here.is_gpu)
        if isinstance(run_file.trust, AuditedTrust):
            machines = replace(machines, hash_s=hash_s(num_parameters(model)))
        return replace(machines, is_half=here.is_half, crowding=crowding), (note,)
    device = profiles.device(own.device)
    if is_exact(run_file.trust) and device.kind != "cpu":
        raise ConfigError(
            f"--device {own.device}: this run's training steps are computed in exact numbers, which are of CPUs. Name "
            'one, or set trust.numerics = "fp32".'
        )
    host_watts = defaults.host_watts if device.kind == "gpu" else 0.0
    machines = replace(
        machines,
        tokens_per_s=speed or tokens_per_s(device, model, train, own.efficiency, is_exact=is_exact(run_file.trust)),
        watts=device.watts + host_watts if own.watts is None else own.watts,
        memory_nbytes=1e9 * device.memory_gb,
        is_gpu=device.kind == "gpu",
        is_half=device.precision != "fp32",
    )
    notes = [_device_note(device, own)]
    if is_exact(run_file.trust) and own.tokens_per_s is None:
        notes.append(f"a step in exact numbers takes {EXACT_TIMES:g} times one in fp32 (benchmarks/reports/exact.md)")
    return machines, tuple(notes)


def _device_note(device: profiles.Device, own: Own) -> str:
    if own.tokens_per_s is not None:
        return f"speed as given; memory and watts of {device.name}: {device.source}"
    defaults = profiles.known().defaults
    usual, source = defaults.gpu_efficiency, defaults.gpu_efficiency_source
    if device.kind == "cpu":
        usual, source = defaults.cpu_efficiency, defaults.cpu_efficiency_source
    share = f"{own.efficiency or usual:.0%}" + (" as given" if own.efficiency else f" ({source})")
    unsure = f"; not checked: {', '.join(device.remembered)}" if device.remembered else ""
    return f"{device.name}: {device.tflops:g} TFLOP/s in {device.precision} ({device.source}), used to {share}{unsure}"


def _cluster(prices: Prices, run_file: RunFile, model: ModelConfig) -> Cluster:
    defaults = profiles.known().defaults
    name = prices.cluster or defaults.cluster_device
    try:
        device = profiles.device(name)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--device", "--cluster")) from None
    price = device.price_per_hour if prices.cluster_price is None else prices.cluster_price
    if price is None:
        raise ConfigError(
            f"--cluster {name}: weft knows no rent for it. Give --cluster-price, for one GPU and one hour."
        )
    return cluster_of(device, prices.cluster_size or defaults.cluster_size, model, run_file.train, price)


def model_of(run_file: RunFile, base: Path, home: Path | None) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the run's model, and what had to be assumed of it."""
    try:
        tokenizer = make_tokenizer(run_file.tokenizer, run_file.data, base)
    except DataError:
        if not isinstance(run_file.tokenizer, CharactersConfig):
            raise
        alphabet = "".join(map(chr, range(ord(" "), ord(" ") + ASSUMED_CHARACTERS)))
        note = f"the text is not here: {ASSUMED_CHARACTERS} different characters are assumed"
        return resolve(run_file, CharTokenizer(alphabet), base, home), (note,)
    return resolve(run_file, tokenizer, base, home), ()


def _bps(mbit: float | None) -> float:
    return math.inf if mbit is None else 1e6 * mbit
