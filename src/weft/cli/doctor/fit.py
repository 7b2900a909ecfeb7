"""What fits on this machine and how fast it would be: named models, and the run of a ticket or of a run file.

    models     the largest that it holds, whole and as one stage of several
    pace       whole training steps of named models, timed, the next larger one while a step is short
    fit        whether a member of the run finds room; `pace`: its steps here, timed, and its share of a round
    bytes      what the run moves: as its members have measured it, or planned by what was timed here and on the line

No model is timed of which a step takes longer than `LONGEST_S`. It imports torch.
"""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from weft.cli.doctor.findings import Fact, Finding
from weft.cli.plan import question as asked
from weft.cli.plan.show import for_evidence
from weft.cli.plan.speed_here import Here, measure_cut, usual_s
from weft.cli.settings import run_file
from weft.clock import Clock
from weft.cost import pipeline as cost_pipeline
from weft.cost import training as cost
from weft.dashboard import figures
from weft.errors import ConfigError, TooLarge
from weft.ids import Digest, several
from weft.launch.code import recall
from weft.launch.corpus import ONE
from weft.launch.peer import charter_at
from weft.launch.terms import Heard, MemberWatch, Terms, terms
from weft.model.config import SIZES, ModelConfig, named, num_parameters
from weft.model.sections import sections
from weft.net.multi_source import small_from
from weft.net.node import Node
from weft.net.speed_test import Speed
from weft.net.ticket import Ticket
from weft.pipeline.config import PipelineConfig
from weft.plan import forecast, profiles
from weft.plan.question import Machines, Question, cluster_of
from weft.plan.timing import Line
from weft.run.amend import amended
from weft.run.config import Genesis, RunConfig, TrainConfig
from weft.run.genesis import MAX_RUN_NBYTES, read_run
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig, held_of
from weft.run.trust import AuditedTrust, MembersTrust, TrustConfig, is_exact
from weft.store.home import Home
from weft.sync.costs import peer_memory
from weft.sync.method.choices import AdamWConfig, Choices
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, spell_out
from weft.sync.method.schedule import ConstantConfig
from weft.training import device as here
from weft.training.section_memory import Holding, least_nbytes

_SEQ_LEN, _VOCAB_SIZE = 1024, 32_000  # of named models, as large ones have them
_FIRST_SEQ_LEN, _FIRST_BATCH, _BYTES = 128, 8, 257  # of the smallest, as recipes/nano.toml trains it
_PEERS = 4  # of whom nobody knows yet
_STAGES = (2, 4, 8, 16, 32)
STEP_S, LONGEST_S = 0.5, 10.0  # of a timed step: as many samples as take so long; one sample at most
TIMED_S, LEAST_STEPS = 1.0, 3  # of steps, once they are warm


# --- named models ---


def models(settings: PeerConfig) -> Iterator[Finding]:
    """Yield which named models fit, and how fast they train."""
    yield largest(settings)
    yield from paces(settings)


def largest(settings: PeerConfig) -> Finding:
    """Return which named sizes this machine can train, one sample of 1024 tokens at a time: whole, and as a stage."""
    device = here.choose(settings)
    free = here.free_nbytes(settings.caps, device)
    room = int(cost.SPARE * free["cpu" if device.is_cpu else str(device.torch)])
    sizes = [(size, named(size, _VOCAB_SIZE, _SEQ_LEN)) for size in SIZES]
    whole = [(size, model) for size, model in sizes if here.fits(_needed(model, device), free)]
    cut = [(size, model, num) for size, model in sizes if (num := _least_stages(model, room)) is not None]
    facts: dict[str, Fact] = {"device": device.name, "free_nbytes": room}
    said = []
    if whole:
        size, model = whole[-1]
        facts |= {"largest": size, "num_parameters": num_parameters(model)}
        said.append(f"has memory to train models up to {size} ({figures.amount(num_parameters(model))} parameters)")
    if cut and (not whole or num_parameters(cut[-1][1]) > num_parameters(whole[-1][1])):
        size, model, num = cut[-1]
        facts |= {"largest_cut": size, "num_stages": num}
        amount = figures.amount(num_parameters(model))
        others = several(num - 1, "machine")
        begins = "" if whole else "has memory to train models "
        said.append(f"{begins}up to {size} ({amount}) with {others} like it, each a part")
    how = f"that is with {figures.nbytes(room)} on {device.name}, and {_SEQ_LEN:,} tokens at a time"
    how += "; how fast one trains here: weft doctor RUN.TOML"
    text = f"{', '.join(said) or 'no named model fits, not even a stage of one'}; {how}"
    return Finding("models", "ok" if said else "note", text, facts=facts)


def _needed(model: ModelConfig, device: here.Device) -> dict[str, int]:
    choices = spell_out(DiLoCoConfig(), _PEERS)
    memory = peer_memory(
        choices,
        AdamWConfig(),
        (),
        num_parameters(model),
        _PEERS,
        num_rounds=1 << 20,
        activations=cost.activation_nbytes(here.decoder(model), 1, _SEQ_LEN, is_half=device.precision != "fp32"),
    )
    return here.by_place(memory, device)


def _least_stages(model: ModelConfig, room: int) -> int | None:
    """Return the fewest stages with which there is room for any of them; None: there is for none."""
    model = msgspec.structs.replace(model, is_tied=False)
    held = Holding(
        model=model, train=_train(_SEQ_LEN, 8), choices=spell_out(DdpConfig(), _PEERS), pipeline=PipelineConfig()
    )
    for num in _STAGES:
        if num <= model.num_layers and least_nbytes(held, sections(model, num)) <= room + cost_pipeline.BASE_NBYTES:
            return num
    return None


def _train(seq_len: int, batch_size: int) -> TrainConfig:
    return TrainConfig(seq_len=seq_len, batch_size=batch_size, tokens=1 << 40, schedule=ConstantConfig())


def paces(settings: PeerConfig, names: Sequence[str] = SIZES) -> Iterator[Finding]:
    """Yield how fast named models train here, until a step of the next one would be long, or it finds no room."""
    flops_per_s: float | None = None
    for size in names:
        is_first = size == SIZES[0]
        seq_len = _FIRST_SEQ_LEN if is_first else _SEQ_LEN
        model = named(size, _BYTES if is_first else _VOCAB_SIZE, seq_len)
        train = _train(seq_len, _FIRST_BATCH if is_first else 1)
        flops = train.batch_size * seq_len * cost.flops_per_token(here.decoder(model), seq_len)
        if flops_per_s is not None and flops / flops_per_s > STEP_S:
            return
        try:
            found = timed(model, train, settings)
        except TooLarge:
            return
        flops_per_s = found.tokens_per_s * cost.flops_per_token(here.decoder(model), seq_len)
        text = (
            f"{size} ({figures.amount(num_parameters(model))} parameters): {found.tokens_per_s:,.0f} tokens/s, "
            f"{train.batch_size} x {seq_len} tokens a step, timed on {found.name}"
        )
        yield Finding("pace", "ok", text, facts=_pace_facts(found, num_parameters(model), flops_per_s))


def _pace_facts(found: Here, num: int, flops_per_s: float) -> dict[str, Fact]:
    return {"device": found.name, "num_parameters": num, "tokens_per_s": found.tokens_per_s, "flops_per_s": flops_per_s}


def timed(
    model: ModelConfig,
    train: TrainConfig,
    settings: PeerConfig,
    stages: int = 1,
    pipeline: PipelineConfig | None = None,
    *,
    exact: bool = False,
) -> Here:
    """Return how fast this machine trains, by about a second of steps.

    Raises:
        TooLarge: there is no room for one.
    """
    micro_batch = (pipeline or PipelineConfig()).micro_batch
    usual = partial(usual_s, measured_s=TIMED_S, least_steps=LEAST_STEPS)
    how = {"on": settings.device, "num_threads": settings.num_threads, "is_exact": exact}
    return measure_cut(model, train, stages, micro_batch, 1, timed=usual, **how)


# --- a run ---


@dataclass(frozen=True, kw_only=True)
class Look:
    """What members on a ticket told of their run.

    Args:
        run: as it is now.
        speed: of the line to one of them; None: it was not measured.
    """

    ticket: Ticket
    run: Genesis
    heard: Heard
    speed: Speed | None
    round_trip_s: float


Asking = Callable[[Ticket, PeerConfig, Speed | None, float], Awaitable[Look]]


@asynccontextmanager
async def asking(node: Node, clock: Clock) -> AsyncIterator[Asking]:
    """Listen to members; yield what asks those that are linked for their run, of which nothing is kept here.

    Raises:
        PeerError: nobody delivered it; ConfigError: it is malformed, or of another format; TooLarge: it is.
    """
    async with MemberWatch(node, clock) as watch:

        async def ask(ticket: Ticket, settings: PeerConfig, speed: Speed | None, round_trip_s: float) -> Look:
            members = sorted(node.peers)
            data = await small_from(node, members, Digest(node.run), MAX_RUN_NBYTES)
            run, charter = read_run(data, settings.max_parameters), await charter_at(node, members[0])
            now = run if charter is None else amended(run, charter)
            heard = await watch.heard()
            return Look(ticket=ticket, run=now, heard=heard, speed=speed, round_trip_s=round_trip_s)

        yield ask


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """What is trained, of a run or a run file."""

    model: ModelConfig
    train: TrainConfig
    stages: int
    pipeline: PipelineConfig
    has_reward: bool
    trust: TrustConfig


def of_ticket(look: Look, home: Path, settings: PeerConfig, flops_per_s: float) -> Iterator[Finding]:
    """Yield whether the run fits here, how fast this machine would be in it, and what it would move.

    Args:
        flops_per_s: with which named models trained.
    """
    run = look.run
    if not isinstance(run, RunConfig):
        text = "its makers' own program trains it, not weft. Ask them how much memory it takes"
        yield Finding("fit", "note", text, facts={"num_parameters": run.num_parameters})
        return
    recall(run, Home(home))
    shown = terms(run, look.ticket, Home(home), settings, look.heard)
    yield _fit(run, shown, home, settings)
    is_cut = isinstance(run, StagedConfig)
    trained = _Trained(
        model=run.model,
        train=run.train,
        stages=run.stages if isinstance(run, StagedConfig) else 1,
        pipeline=run.pipeline if isinstance(run, StagedConfig) else PipelineConfig(),
        has_reward=run.reward is not msgspec.UNSET,
        trust=run.trust or MembersTrust(),
    )
    found = _timed(trained, settings, flops_per_s)
    if isinstance(found, Finding):
        yield found
        yield _bytes_of(shown, None)
        return
    machines = _company(found, look)
    question = _question(trained, run.method, machines, run.has_even_leases, run.electors)
    share = _share(question) if look.heard.speeds and not is_cut else None
    yield _pace(found, trained, max(look.heard.speeds, default=None), share)
    yield _bytes_of(shown, question if look.speed is not None and not is_cut else None)


def of_run_file(path: Path, home: Path, settings: PeerConfig, flops_per_s: float) -> Iterator[Finding]:
    """Yield the same of a run file, among as many peers as it expects, all like this machine, on a home line.

    Raises:
        WeftError: the file makes no sense, or its tokenizer cannot be read.
    """
    described = run_file(path, ())
    model, notes = asked.model_of(described, path.absolute().parent, home)
    trained = _Trained(
        model=model,
        train=described.train,
        stages=described.stages,
        pipeline=described.pipeline,
        has_reward=described.reward is not None,
        trust=described.trust,
    )
    found, choices = _timed(trained, settings, flops_per_s), spell_out(described.method, described.peers)
    line = asked.line("home", None, None, None).line
    device = here.choose(settings)
    free = here.free_nbytes(settings.caps, device)
    machines = Machines(
        name="here",
        count=described.peers,
        line=line,
        tokens_per_s=1.0 if isinstance(found, Finding) else found.tokens_per_s,
        memory_nbytes=free["cpu" if device.is_cpu else str(device.torch)],
        is_gpu=not device.is_cpu,
        is_half=device.precision != "fp32",
    )
    question = _question(trained, choices, (machines,), described.has_even_leases, described.electors)
    told = asked.needed_here(described, path.absolute().parent, home, settings, device)
    yield _fit_of_file(question, trained, device, told)
    if isinstance(found, Finding):
        yield found
        return
    share = 1 / described.peers if described.stages == 1 else None
    yield _pace(found, trained, None, share, notes if described.reward is None else (*notes, asked.DRAWN))
    if described.stages == 1:
        yield _planned(question, f"among {several(described.peers, 'peer')} like this machine, on a home line")


def _fit(run: RunConfig, shown: Terms, home: Path, settings: PeerConfig) -> Finding:
    free = here.free_nbytes(settings.caps, here.choose(settings))
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    room, stages = shutil.disk_usage(place).free, [str(stage + 1) for stage in shown.stages]
    facts: dict[str, Fact] = {
        "num_parameters": shown.num_parameters,
        "stages": stages,
        "needed_nbytes": shown.memory_nbytes,
        "free_nbytes": sum(free.values()),
        "fetch_nbytes": shown.fetch_nbytes,
        "disk_nbytes": shown.disk_nbytes,
    }
    try:
        ONE.check_fits(held_of(run), settings)
    except TooLarge as error:
        return Finding("fit", "block", f"{run.name} does not fit: {error}", "join from a machine with more room", facts)
    except ConfigError as error:
        return Finding("fit", "block", f"{run.name}: {error}", facts=facts)
    what = f"stage {' and '.join(stages)}, " if stages else ""
    text = (
        f"{run.name}: {what}{figures.amount(shown.num_parameters)} parameters; "
        f"{'to draw texts, and ' * shown.draws_texts}to train {several(shown.micro_batch, 'sample')} at a time takes "
        f"about {figures.nbytes(shown.process_nbytes + shown.memory_nbytes)} of memory, "
        f"{figures.nbytes(shown.process_nbytes)} of it for the program itself"
        f"{_for_audits(shown.audits_nbytes, here.evidence_nbytes(run))}; "
        f"{figures.nbytes(sum(free.values()))} are free. It takes "
        f"{figures.nbytes(shown.disk_nbytes)} of disk, of {figures.nbytes(room)}"
    )
    if shown.disk_nbytes > room:
        return Finding("fit", "note", text, "free disk, or choose another home: --home FOLDER", facts)
    return Finding("fit", "ok", text, facts=facts)


def _for_audits(nbytes: int, evidence_nbytes: int) -> str:
    """Return in words what of it is for audits, and what evidence takes beside; nothing where there are none."""
    return f" and {figures.nbytes(nbytes)} for audits{for_evidence(evidence_nbytes)}" if nbytes else ""


def _fit_of_file(
    question: Question, trained: _Trained, device: here.Device, told: tuple[dict[str, int], int] | None = None
) -> Finding:
    """Return whether a peer of a run file finds room: for the model, or for any of its sections.

    Args:
        told: what `needed_here` returns.
    """
    (machines,) = question.machines
    num, free = num_parameters(trained.model), int(machines.memory_nbytes or 0)
    if trained.stages > 1:
        held = Holding(
            model=trained.model,
            train=trained.train,
            choices=question.choices,
            pipeline=trained.pipeline,
            is_audited=isinstance(question.trust, AuditedTrust),
        )
        needed = least_nbytes(held, sections(trained.model, trained.stages)) - cost_pipeline.BASE_NBYTES
        has_room, what = needed <= cost.SPARE * free, f"the largest of {trained.stages} stages"
    else:
        held_here = forecast.hold(question, machines)
        needed, has_room = held_here.on_device or held_here.on_host, bool(held_here.has_room)
        num_samples = held_here.micro_batch
        if told is not None:
            needed, num_samples = sum(told[0].values()), told[1]
        has_room = has_room or told is not None
        what = f"to train {several(num_samples, 'sample')} at a time"
    program, audits = here.program_nbytes(device), ""
    if trained.stages == 1:
        audits = _for_audits(forecast.audits_nbytes(question), forecast.evidence_nbytes(question))
    facts: dict[str, Fact] = {"num_parameters": num, "needed_nbytes": needed, "free_nbytes": free}
    text = (
        f"{figures.amount(num)} parameters: {what} takes about {figures.nbytes(needed + program)} of memory, "
        f"{figures.nbytes(program)} of it for the program itself{audits}; {figures.nbytes(free)} are free on "
        f"{device.name}"
    )
    if has_room:
        return Finding("fit", "ok", text, facts=facts)
    fix = "use a smaller model, more stages, shorter samples, or a machine with more room"
    return Finding("fit", "block", f"{text}: it does not fit", fix, facts)


def _timed(trained: _Trained, settings: PeerConfig, flops_per_s: float) -> Here | Finding:
    """Return how fast this machine trains it; why that was not timed, where a single sample would take long."""
    train = trained.train
    flops = train.seq_len * cost.flops_per_token(here.decoder(trained.model), train.seq_len) / trained.stages
    exact = is_exact(trained.trust)
    sample_s = flops / flops_per_s * (cost.EXACT_TIMES if exact else 1.0)
    facts: dict[str, Fact] = {"tokens_per_s": None}
    if sample_s > LONGEST_S:
        text = f"not timed: a training step of a single sample would take about {figures.seconds(sample_s)} here"
        return Finding("pace", "note", text, facts=facts)
    num_samples = max(1, min(train.batch_size, int(STEP_S / sample_s)))
    try:
        part = msgspec.structs.replace(train, batch_size=num_samples)
        return timed(trained.model, part, settings, trained.stages, trained.pipeline, exact=exact)
    except TooLarge:
        return Finding("pace", "note", "not timed: there is no room for a training step", facts=facts)


def _pace(
    found: Here, trained: _Trained, fastest: float | None, share: float | None, notes: Sequence[str] = ()
) -> Finding:
    step_s = trained.train.batch_size * trained.train.seq_len / found.tokens_per_s
    said = [f"{found.tokens_per_s:,.0f} tokens/s, {figures.seconds(step_s)} a training step, timed on {found.name}"]
    if trained.stages > 1:
        said[0] += f", with one of the {trained.stages} sections"
    if fastest is not None:
        said.append(f"the run's fastest member makes {fastest:,.0f}")
    if share is not None:
        said.append(f"this machine would train about {share:.0%} of a round's tokens")
    facts: dict[str, Fact] = {
        "device": found.name,
        "num_parameters": num_parameters(trained.model),
        "tokens_per_s": found.tokens_per_s,
        "fastest_tokens_per_s": fastest,
        "share": share,
    }
    return Finding("pace", "ok", "; ".join((*said, *notes)), facts=facts)


def _bytes_of(shown: Terms, question: Question | None) -> Finding:
    """Return what a day moves: as members have measured it; else planned; else why it is not known."""
    if shown.day_nbytes is not None and (rounds := shown.rounds) is not None:
        told = several(rounds.num_told, "member")
        text = (
            f"{figures.nbytes(shown.round_nbytes)} a round, about {figures.nbytes(shown.day_nbytes)} a day: "
            f"{figures.seconds(rounds.round_s)} from one round to the next, as {told} measured"
        )
        return Finding("bytes", "ok", text, facts=_byte_facts(shown.round_nbytes, rounds.round_s, shown.day_nbytes))
    if question is not None:
        return _planned(question, f"{shown.why_no_day}; this is planned from the speed of this machine and of the line")
    text = f"{figures.nbytes(shown.round_nbytes)} a round; bytes a day are not known: {shown.why_no_day}"
    return Finding("bytes", "ok", text, facts=_byte_facts(shown.round_nbytes, None, None))


def _planned(question: Question, why: str) -> Finding:
    try:
        pace = forecast.pace_of(question)
    except ConfigError as error:
        return Finding("bytes", "ok", f"not known: {error}", facts=_byte_facts(None, None, None))
    nbytes = pace.traffic.sent_nbytes + pace.traffic.received_nbytes
    text = (
        f"{figures.nbytes(nbytes)} a round, about {figures.nbytes(1e9 * pace.gigabytes_per_day)} a day in rounds of "
        f"{figures.seconds(pace.round.total_s)} ({why})"
    )
    facts = _byte_facts(nbytes, pace.round.total_s, 1e9 * pace.gigabytes_per_day, is_measured=False)
    return Finding("bytes", "ok", text, facts=facts)


def _byte_facts(
    round_nbytes: int | None, round_s: float | None, day_nbytes: float | None, *, is_measured: bool = True
) -> dict[str, Fact]:
    return {
        "round_nbytes": round_nbytes,
        "round_s": round_s,
        "day_nbytes": day_nbytes,
        "is_measured": is_measured and day_nbytes is not None,
    }


# --- what a plan is asked ---


def _company(found: Here, look: Look) -> tuple[Machines, ...]:
    """Return this machine and the members, whose speed is this one's where they have not told theirs."""
    line, heard = Line(), look.heard
    if look.speed is not None:  # between two peers, who are as far from the middle
        line = Line(up_bps=look.speed.up_bps, down_bps=look.speed.down_bps, delay_s=look.round_trip_s / 4)
    mine = Machines(name="here", count=1, line=line, tokens_per_s=found.tokens_per_s, is_gpu=found.is_gpu)
    told = [replace(mine, name=f"member {number}", tokens_per_s=speed) for number, speed in enumerate(heard.speeds, 1)]
    num_silent = max(heard.num_members, heard.num_linked, 1) - len(told)
    return (mine, *told, *((replace(mine, name="others", count=num_silent),) if num_silent > 0 else ()))


def _question(
    trained: _Trained, choices: Choices, machines: tuple[Machines, ...], has_even_leases: bool, electors: int
) -> Question:
    defaults = profiles.known().defaults
    device = profiles.device(defaults.cluster_device)  # nothing that is told here is held against it
    return Question(
        model=trained.model,
        train=trained.train,
        choices=choices,
        machines=machines,
        cluster=cluster_of(device, defaults.cluster_size, trained.model, trained.train, 0.0),
        has_even_leases=has_even_leases,
        has_reward=trained.has_reward,
        trust=trained.trust,
        price_per_kwh=defaults.price_per_kwh,
        idle_share=defaults.idle_share,
        electors=electors,
    )


def _share(question: Question) -> float:
    """Return what part of a round's tokens the first of the machines is leased."""
    leased = forecast.leased_tokens(question)
    first, *_ = question.machines
    return leased[first.name] / sum(each.count * leased[each.name] for each in question.machines)
