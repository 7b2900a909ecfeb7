"""What `weft plan --serve` prints for people."""

from collections.abc import Iterator, Mapping

from weft.cli.plan.serving import BATCHES, Answer, Ring, Room, Share
from weft.cli.plan.show import seconds, titled
from weft.dashboard import figures
from weft.engine.scheduling.pages import PAGE
from weft.ids import several
from weft.model.config import num_parameters
from weft.plan.serve import Bound, Speed

_BOUND: dict[Bound, str] = {
    "weights": "reading weights",
    "arithmetic": "arithmetic",
    "keys and values": "reading keys and values",
    "drawing": "drawing tokens",
    "small operations": "many small operations",
    "line": "lines",
}


def lines(told: Answer) -> Iterator[str]:
    """Yield what to tell of it, line by line."""
    config, timed = told.model.config, told.timed
    yield from titled(
        told.model.name, f"{figures.amount(num_parameters(config))} parameters in {timed.kind}, on {told.machine}"
    )
    weights = (f"{kind} {figures.nbytes(nbytes)}" for kind, nbytes in told.weights_nbytes.items())
    yield from titled("weights", ", ".join(weights))
    yield from titled("pages", f"{PAGE} tokens take {figures.nbytes(told.page_nbytes)}; {_room(told)}")
    if told.room is not None and told.room.graphs_nbytes:
        yield from titled("graphs", _graphs(told.room))
    yield from titled("machine", _machine(told))
    yield ""
    yield from _table("on this machine", told.speeds)
    yield from titled("first token", _first(told.first_token_s))
    if told.ring is not None:
        yield ""
        yield from _ring(told.ring)
    if told.share is not None:
        yield ""
        yield from _share(told.share)
    yield ""
    for note in (*_notes(told), *told.model.notes):
        yield from titled("note", note)


def _room(told: Answer) -> str:
    room = told.room
    if room is None:
        return f"IT DOES NOT FIT: {told.objection}"
    texts = ", or ".join(f"{several(num, 'text')} of {length:,} tokens" for length, num in room.texts.items())
    return (
        f"of {figures.nbytes(room.free_nbytes)} that are free weft serve takes {figures.nbytes(room.kv_nbytes)} for "
        f"{room.num_pages:,} of them: {texts}"
    )


def _graphs(room: Room) -> str:
    return (
        f"CUDA graphs come to hold up to {figures.nbytes(room.graphs_nbytes)} beside, once answers of all lengths and "
        "numbers were under way; where there is no room for one, such steps are slower"
    )


def _machine(told: Answer) -> str:
    timed = told.timed
    rates = ", ".join(f"{rate / 1e12:.3g} in {kind}" for kind, rate in timed.rates.items() if kind != "exact")
    return f"reads {figures.nbytes(timed.bandwidth)}/s; {rates}, in 10^12 operations/s"


def _table(title: str, speeds: Mapping[int, tuple[Speed, ...]]) -> Iterator[str]:
    yield f"  {title + ', tokens/s':<30}" + "".join(f"{f'{num:,} before':>16}" for num in speeds) + "   held up by"
    for at, num in enumerate(BATCHES):
        some = [each[at] for each in speeds.values()]
        cells = "".join(f"{_rate(each.tokens_per_s):>16}" for each in some)
        bounds = dict.fromkeys(_BOUND[each.bound] for each in some)
        yield f"  {several(num, 'text'):<30}{cells}   {', then '.join(bounds)}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def _first(first_token_s: Mapping[int, float]) -> str:
    told = ", ".join(f"{seconds(took_s)} after a prompt of {num:,} tokens" for num, took_s in first_token_s.items())
    return f"{told}, with nobody else there"


def _ring(ring: Ring) -> Iterator[str]:
    bps = figures.rate(ring.link.bps) if ring.link.bps < float("inf") else "no limit"
    yield from titled(
        "stages",
        f"{ring.num_stages}, each by a machine like this one; a round trip of {seconds(ring.link.rtt_s)} and {bps} "
        f"between any two; {ring.row_nbytes:,} bytes a token from each to the next",
    )
    yield from titled(
        "memory",
        f"{figures.nbytes(ring.weights_nbytes)} of weights in the largest stage, twice while one version follows "
        f"another; each GB of serve_nbytes holds {ring.tokens_per_gb:,} tokens",
    )
    yield from _table("through the stages", ring.speeds)
    yield from titled("first token", _first(ring.first_token_s))


def _share(share: Share) -> Iterator[str]:
    alone, beside = share.training
    yield from titled(
        "share",
        f"with {share.share:.0%} of each machine for answers training goes from {alone:,.0f} to {beside:,.0f} tokens/s "
        f"({beside / alone - 1:.0%}) while they are asked for; then they come no faster than",
    )
    yield from _table("by that share", share.speeds)


def _notes(told: Answer) -> Iterator[str]:
    yield (
        "tokens are drawn at temperature 1, and none is guessed: what repeats its prompt comes faster. Prompts that "
        "begin alike are read once"
    )
    if told.ring is not None:
        yield (
            "lines are those of all machines alike, and one member computes each stage: more of them share the texts. "
            "Answers go on in groups, which is reckoned at its best"
        )
