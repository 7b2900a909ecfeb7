"""What `weft plan` prints: for people, with the parts of each figure beside it; for programs, as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from weft.cli.plan.question import Asked
from weft.cli.terminal import terminal_width, wrapped
from weft.cost import training as cost
from weft.cost.pipeline import BASE_NBYTES
from weft.dashboard import figures
from weft.ids import several
from weft.launch.terms import CHECKPOINT_VECTORS, DAY_S
from weft.plan.forecast import Bill, Forecast, Hold, Part, evidence_nbytes
from weft.plan.loss import FEW_ROUNDS
from weft.plan.methods import Row, name_of
from weft.plan.profiles import known
from weft.plan.timing import RoundTime
from weft.run.machine import PeerConfig
from weft.sync.records.messages import MAX_GROUP
from weft.training.device import choose, program_nbytes

TOKEN_NBYTES = 2  # on the disk
SMALL = 100_000_000  # parameters: efficiencies were published of larger models
_INDENT = " " * 14
_ADVICE = "choose a smaller model, or machines with more memory"


def lines(asked: Asked, plan: Forecast, table: Sequence[Row], chosen: Row) -> Iterator[str]:
    """Yield what to tell of a plan, line by line."""
    question, pace = plan.question, plan.pace
    round = pace.round
    peers = " + ".join(f"{each.count} {each.name}" for each in question.machines)
    yield from titled(
        asked.name,
        f"{question.num_parameters:,} parameters, {figures.amount(question.train.tokens)} tokens, "
        f"{name_of(question.choices)}, {peers}",
    )
    yield from titled("round", f"{seconds(round.total_s)}: {_parts(round)}")
    yield from titled(
        "speed",
        f"{pace.tokens_per_s:,.0f} tokens/s, machines train {round.utilisation:.0%} of the time; "
        f"{several(pace.num_rounds, 'round')}, {figures.duration(pace.total_s)} in all",
    )
    sent, received = pace.traffic.sent_nbytes, pace.traffic.received_nbytes
    yield from titled(
        "bytes",
        f"each sends {figures.nbytes(sent)} and receives {figures.nbytes(received)} a round, "
        f"{pace.gigabytes_per_day:.3g} GB a day in all" + (", on average" if pace.levels else ""),
    )
    yield from _levels(plan)
    for hold in plan.memory:
        yield from titled("memory", _held(hold))
    yield from _audits(plan)
    yield from titled("energy", _energy(plan))
    yield from titled("money", _money(plan))
    yield ""
    yield from _against(plan)
    yield ""
    yield from _methods(table, chosen)
    yield ""
    for note in (*_warnings(plan), *asked.notes, *_sources(plan)):
        yield from titled("note", note)


def short(asked: Asked, plan: Forecast) -> Iterator[str]:
    """Yield the same in at most eight lines: time, bytes, memory, disk, and what they follow from; nine with audits."""
    question, pace = plan.question, plan.pace
    peers, tokens = several(question.num_peers, "peer"), figures.amount(question.train.tokens)
    yield from titled(asked.name, f"{figures.amount(question.num_parameters)} parameters, {tokens} tokens, {peers}")
    rounds = f"{several(pace.num_rounds, 'round')} of {seconds(pace.round.total_s)}"
    busy = "" if question.num_peers == 1 else f"; machines train {pace.round.utilisation:.0%} of it"
    yield from titled("time", f"about {figures.seconds(pace.total_s)}: {rounds}{busy}")
    yield from titled("bytes", _moved(plan))
    yield from titled("memory", _taken(asked, plan))
    yield from titled("disk", _written(asked))
    yield from _audits_in_short(plan)
    yield from titled("speed", asked.speed)
    yield from titled("lines", asked.lines)
    for note in (*_no_room(plan), *asked.assumed):
        yield from titled("note", note)
    yield from titled("more", "--details: rounds in parts, energy, money, other methods")


def _written(asked: Asked) -> str:
    """Return what a peer writes: the text as tokens, and checkpoints."""
    state = CHECKPOINT_VECTORS * cost.vector_nbytes(asked.question.num_parameters)
    if asked.text_nbytes is None:
        return f"{figures.nbytes(state)} of checkpoints, and the text, which was not looked at"
    text = TOKEN_NBYTES * asked.text_nbytes
    return (
        f"about {figures.nbytes(text + state)}: {figures.nbytes(text)} of text, {figures.nbytes(state)} of checkpoints"
    )


def _moved(plan: Forecast) -> str:
    pace = plan.pace
    nbytes = pace.traffic.sent_nbytes + pace.traffic.received_nbytes
    if plan.question.num_peers == 1:
        return "nothing while a peer is alone; --peers 2 says what two move"
    a_day = f", {figures.nbytes(1e9 * pace.gigabytes_per_day)} a day" if pace.total_s > DAY_S else ""
    return f"{figures.nbytes(nbytes)} a round by each peer{a_day}, {figures.nbytes(nbytes * pace.num_rounds)} in all"


def _audits_in_short(plan: Forecast) -> Iterator[str]:
    """Yield what audits take: of speed, bytes and memory they are in the figures above, of disk beside them."""
    if (cost := plan.pace.audits) is None:
        return
    moved = figures.nbytes(cost.traffic.sent_nbytes + cost.traffic.received_nbytes)
    yield from titled(
        "audits",
        f"{plan.pace.audited_speed:.0%} of the speed without, {moved} a round of these bytes, up to "
        f"{figures.nbytes(cost.memory_nbytes)} of this memory for moments; beside it "
        f"{figures.nbytes(plan.pace.kept_nbytes)} of disk{for_evidence(evidence_nbytes(plan.question))}",
    )


def _audits(plan: Forecast) -> Iterator[str]:
    """Yield the same with what it is made of."""
    pace, trust = plan.pace, plan.question.audits
    if (cost := pace.audits) is None or trust is None:
        return
    parts = seconds_of(
        [
            ("hashing states", cost.hash_s),
            ("keeping some", cost.keep_s),
            ("training and merging again", min(cost.again_s, cost.waited_s)),
            ("waiting for who has more to do again", max(0.0, cost.waited_s - cost.again_s)),
        ]
    )
    yield from titled(
        "audits",
        f"{pace.audited_speed:.1%} of the speed without, at audit_rate = {trust.audit_rate:g}: {parts or 'no time'} in "
        f"a round; {cost.num_audits:.3g} audits of each peer a round, on average",
    )
    least, most = map(figures.nbytes, cost.step_nbytes)
    yield from titled(
        "",
        f"each sends and receives {figures.nbytes(cost.traffic.sent_nbytes)} of the bytes a round for them: {least} "
        f"for steps (up to {most} where machines round differently), {figures.nbytes(cost.part_nbytes)} for a part",
    )
    yield from titled(
        "",
        f"up to {figures.nbytes(cost.memory_nbytes)} of the machine's own memory for moments, in the figure above, and "
        f"{figures.nbytes(plan.pace.kept_nbytes)} of disk, beside the others"
        f"{for_evidence(evidence_nbytes(plan.question))}",
    )


def for_evidence(nbytes: int) -> str:
    """Return in words what looking for evidence takes beside all other memory; nothing where there is none."""
    return f"; {figures.nbytes(nbytes)} of memory more, if they are free, where a fault was found" if nbytes else ""


def _taken(asked: Asked, plan: Forecast) -> str:
    """Return what a peer takes: on this machine as `weft train` and `weft join` say it."""
    if asked.here is not None:
        needed, num_samples = asked.here
        places = {**needed, "cpu": needed["cpu"] + program_nbytes(choose(PeerConfig()))}
        return f"about {figures.by_place(places)} of each machine, {several(num_samples, 'sample')} at a time"
    most = max(plan.memory, key=lambda hold: hold.on_device + hold.on_host)
    on_device = f"{figures.nbytes(most.on_device)} on the device and " if most.on_device else ""
    taken = f"about {on_device}{figures.nbytes(most.on_host + BASE_NBYTES)} of each machine"
    return f"IT DOES NOT FIT: {taken}; {_ADVICE}" if most.has_room is False else taken


def titled(name: str, text: str) -> Iterator[str]:
    """Yield a paragraph behind its title."""
    yield wrapped(f"{name:<{len(_INDENT) - 1}} {text}", max(80, terminal_width()), _INDENT)


def _levels(plan: Forecast) -> Iterator[str]:
    question, pace = plan.question, plan.pace
    if pace.levels is None:
        return
    num = question.num_electors
    peers = (
        (f"each of {several(num, 'peer')} with a vote", pace.levels.elector),
        (f"each of {several(question.num_peers - num, 'peer')} without a vote", pace.levels.ward),
    )
    for who, traffic in peers:
        sent, received = traffic.sent_nbytes, traffic.received_nbytes
        a_day = cost.gigabytes_per_day(sent + received, pace.round.total_s)
        yield from titled(
            "", f"{who}: {figures.nbytes(sent)} sent, {figures.nbytes(received)} received, {a_day:.3g} GB a day"
        )


def seconds(took_s: float) -> str:
    if took_s < 1:
        return f"{1000 * took_s:.0f} ms"
    return f"{took_s:.3g} s" if took_s < 100 else figures.duration(took_s)


def seconds_of(parts: Sequence[tuple[str, float]]) -> str:
    """Return what a time is made of, without what is too short to be told."""
    return ", ".join(f"{seconds(took_s)} {name}" for name, took_s in parts if took_s >= 0.0005)


def _parts(round: RoundTime) -> str:
    stages = (
        ("training", round.train_s),
        ("waiting for slower machines", round.uneven_s),
        ("peers without a vote", round.wards_s),
        ("updates up", round.contribute_s),
        ("results", round.result_s),
        ("messages", round.messages_s),
        ("processors", round.serve_s),
        ("evaluation", round.evaluate_s),
        ("audits", round.audit_s),
    )
    return seconds_of(stages)


def _held(hold: Hold) -> str:
    places = f"{figures.nbytes(hold.on_device)} on the device, " if hold.on_device else ""
    room = {None: "", True: "; it fits", False: f"; IT DOES NOT FIT: {_ADVICE}"}[hold.has_room]
    samples = several(hold.micro_batch, "sample")
    return f"{places}{figures.nbytes(hold.on_host)} of the machine's own, {samples} at a time{room}"


def _energy(plan: Forecast) -> str:
    if not plan.bill.kwh:
        return "not known: give --watts, or --device by name"
    watts = ", ".join(f"{each.watts:.0f} W" for each in plan.question.machines)
    there = f"{_amount(plan.cluster_bill.kwh)} kWh in the data centre"
    return f"{_amount(plan.bill.kwh)} kWh, at {watts} a machine while it trains; {there}"


def _money(plan: Forecast) -> str:
    bill, cluster = plan.bill, plan.question.cluster
    own = "not known without --watts" if not bill.money else f"{_amount(bill.money)} ({_paid(plan, bill)})"
    return (
        f"{own}; {_amount(plan.cluster_bill.money)} in the data centre ({cluster.count} {cluster.name} at "
        f"{cluster.price_per_hour:.2f} an hour)"
    )


def _paid(plan: Forecast, bill: Bill) -> str:
    paid = [] if bill.rent == bill.money else [f"{plan.question.price_per_kwh:.2f} a kWh"]
    return " and ".join([*paid, "rent"] if bill.rent else paid)


def _against(plan: Forecast) -> Iterator[str]:
    cluster, multiplier = plan.question.cluster, plan.multiplier
    yield from titled(
        "data centre", f"{cluster.count} {cluster.name}, bf16 ring DDP: {seconds(plan.cluster_s)} for as many tokens"
    )
    yield from titled(
        "multiplier", f"{multiplier.of_time:.3g}x the time to the same loss = {_product(multiplier.time)}"
    )
    yield from titled(
        "", f"{multiplier.of_distance:.3g}x of it because machines are apart; the rest because they differ"
    )
    if multiplier.energy:
        yield from titled("", f"{multiplier.of_energy:.3g}x the energy = {_product(multiplier.energy)}")
    if multiplier.money:
        yield from titled("", f"{multiplier.money:.3g}x the money")


def _product(parts: Sequence[Part]) -> str:
    told = [part for part in parts if abs(part.factor - 1) >= 0.0005]
    return " x ".join(f"{part.factor:.3g} {part.name}" for part in told) or "1"


def _methods(table: Sequence[Row], chosen: Row) -> Iterator[str]:
    header = f"{'tokens/s':>10}{'training':>10}{'GB/day':>10}{'time':>14}{'loss':>8}{'same loss':>14}"
    yield f"  {'method':<22}{header}"
    for row in table:
        pace = row.pace
        loss = "?" if pace.penalty is None else f"{pace.penalty.share:+.1%}"
        same = "?" if pace.same_loss_s is None else figures.duration(pace.same_loss_s)
        mark = "*" if row is chosen else "-" if row.is_asked else " "
        yield (
            f"{mark} {row.name:<22}{pace.tokens_per_s:>10,.0f}{pace.round.utilisation:>10.0%}"
            f"{pace.gigabytes_per_day:>10.3g}{figures.duration(pace.total_s):>14}{loss:>8}{same:>14}"
            + (f"  {row.objection}" if row.objection else "")
        )
    yield ""
    yield from titled("method", _why(chosen))


def _why(chosen: Row) -> str:
    if chosen.objection:
        return f"{chosen.name}, the run's own: no row is known to be better ({chosen.objection})"
    own = "the run's own" if chosen.is_asked else "not the run's own"
    return (
        f"{chosen.name} (*), {own}: it needs the least time for the loss that training in one place reaches with as "
        "many tokens"
    )


def _no_room(plan: Forecast) -> Iterator[str]:
    question = plan.question
    if question.num_peers > question.num_electors * MAX_GROUP:
        yield (
            f"{several(question.num_electors, 'peer')} with a vote can take at most "
            f"{several(question.num_electors * (MAX_GROUP - 1), 'peer')} without a vote: "
            "the others find no room, so figures that count them are wrong"
        )


def _warnings(plan: Forecast) -> Iterator[str]:
    question, pace = plan.question, plan.pace
    yield from _no_room(plan)
    for name in pace.round.late:
        yield f"rounds do not wait for {name}: what they train is counted some rounds later"
    if pace.penalty is not None and not question.choices.sends_gradient and question.num_peers > 1:
        if pace.num_rounds < FEW_ROUNDS:
            yield (
                f"so few rounds ({pace.num_rounds}) cost more than this estimate says: four small peers ended 8 % "
                "above one peer's loss after 100, 13 % after 20 (benchmarks/reports/shakespeare.md)"
            )
        if pace.penalty.notes:
            yield f"what rare rounds cost in loss is a guess: it was {' and '.join(pace.penalty.notes)}"


def _sources(plan: Forecast) -> Iterator[str]:
    found, cluster = known(), plan.question.cluster
    if plan.question.num_parameters < SMALL:
        yield (
            f"a model this small uses far less of {cluster.name} than the estimate says "
            f"({found.defaults.gpu_efficiency:.0%}): the data centre's figures are the least it can take"
        )
    yield f"loss: {found.replicas.source}; {found.steps.source}"
    usual = found.defaults
    if plan.question.price_per_kwh == usual.price_per_kwh and plan.bill.kwh:
        yield f"{usual.price_per_kwh:.2f} a kWh: {usual.price_per_kwh_source}"
    for device in found.device:
        if device.name == cluster.name and device.price_per_hour == cluster.price_per_hour:
            yield f"{cluster.price_per_hour:.2f} an hour of {cluster.name}: {device.price_source}"


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def as_json(asked: Asked, plan: Forecast, table: Sequence[Row], chosen: Row) -> str:
    """Return everything of a plan as one JSON object: seconds, bytes, kilowatt hours, and money as prices are given."""
    multiplier, pace = plan.multiplier, plan.pace
    tree: dict[str, Any] = {
        "name": asked.name,
        "num_parameters": plan.question.num_parameters,
        "num_peers": plan.question.num_peers,
        "method": name_of(plan.question.choices),
        "round": {"total_s": pace.round.total_s, "utilisation": pace.round.utilisation, **asdict(pace.round)},
        "round_tokens": pace.tokens,
        "num_rounds": pace.num_rounds,
        "tokens_per_s": pace.tokens_per_s,
        "total_s": pace.total_s,
        "sent_nbytes": pace.traffic.sent_nbytes,
        "received_nbytes": pace.traffic.received_nbytes,
        "gigabytes_per_day": pace.gigabytes_per_day,
        "num_electors": plan.question.num_electors,
        "levels": pace.levels,
        "audits": _audits_tree(plan),
        "memory": plan.memory,
        "bill": plan.bill,
        "cluster": {"total_s": plan.cluster_s, "bill": plan.cluster_bill, **asdict(plan.question.cluster)},
        "multiplier": {
            "time": multiplier.of_time,
            "distance": multiplier.of_distance,
            "energy": multiplier.of_energy if multiplier.energy else None,
            "money": multiplier.money,
            "time_parts": multiplier.time,
            "energy_parts": multiplier.energy,
        },
        "methods": [
            {
                "name": row.name,
                "is_asked": row.is_asked,
                "is_chosen": row is chosen,
                "objection": row.objection,
                "tokens_per_s": row.pace.tokens_per_s,
                "utilisation": row.pace.round.utilisation,
                "round_s": row.pace.round.total_s,
                "gigabytes_per_day": row.pace.gigabytes_per_day,
                "total_s": row.pace.total_s,
                "loss_share": None if row.pace.penalty is None else row.pace.penalty.share,
                "same_loss_s": row.pace.same_loss_s,
            }
            for row in table
        ],
        "notes": [*_warnings(plan), *asked.notes, *_sources(plan)],
    }
    return spelt(tree)


def _audits_tree(plan: Forecast) -> dict[str, Any] | None:
    if (found := plan.pace.audits) is None:
        return None
    tree = {"speed": plan.pace.audited_speed, "disk_nbytes": plan.pace.kept_nbytes, **asdict(found)}
    tree["evidence_nbytes"] = evidence_nbytes(plan.question)
    del tree["customs"]  # of all runs
    return tree


def spelt(tree: dict[str, Any]) -> str:
    """Return JSON that people can read, too."""
    return msgspec.json.format(msgspec.json.encode(tree)).decode()
