"""What a run came to, in one file that can be sent around: HTML, or Markdown.

    configuration, curves, peers and what each contributed, bytes, faults survived, environment, how to repeat it

Of several runs (`compared`) the curves lie over each other. Pictures are SVG inside the file; it asks no host for
anything, and holds no address, path or ticket.

Pure: figures in, text out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from statistics import median
from typing import Any

import msgspec
from msgspec import UNSET

from weft import events
from weft.config import dump
from weft.dashboard import figures
from weft.dashboard.audits import OUTCOMES, share
from weft.dashboard.chart import Curve, chart
from weft.dashboard.history import PeerNow
from weft.dashboard.run import Run
from weft.dashboard.view import BEFORE_IT_BEGINS
from weft.dashboard.words import WARNING, in_words
from weft.events import BranchOpened, PeerStarted, PeerStopped, Preferred
from weft.ids import PeerId, several
from weft.run.amend import ADAPTER, MODEL, SPACE, TOKENIZER, run_file_of, text_of, without_places
from weft.run.config import FolderAdapter, RunConfig, RunFile, SpaceModel
from weft.store.evaluations import Evaluation, Result
from weft.wire import printable

MAX_FAULTS = 40  # that are told one by one, and moves
MAX_SPANS = 6  # peers that are named in a sentence
_RESTART = "restart"
_RETURNS = frozenset(kind.__name__ for kind in (events.WorkDropped, events.BranchLeft))  # what a return may cost
# What is counted of each kind, where anything is amiss.
FAULTS = {
    _RESTART: "restarts without an end",
    **{
        kind.__name__: what
        for kind, what in {
            events.FellBack: "replacements of what does not work",
            events.ConnectionDropped: "connections dropped",
            events.AdmissionRefused: "peers not admitted",
            events.MemberSuspected: "peers silent",
            events.MemberGone: "peers gone",
            events.MemberStrays: "updates or losses unlike the others'",
            events.LoopStalled: "times a machine stood still",
            events.NotLearning: "losses that do not fall",
            events.Diverged: "losses above that of who knows nothing",
            events.RoundMissed: "rounds missed",
            events.MajorityLost: "times without most of the members",
            events.BranchOpened: "times some went on by themselves",
            events.BranchLeft: "returns to what the others had trained",
            events.WorkDropped: "times work did not count",
            events.LegacyDropped: "times work of some by themselves did not count",
            events.LieProven: "lies",
            events.WorkDoubted: "training steps that others could not do again",
            events.AuditorDoubted: "audits that were not what had been sealed, or were not opened",
            events.RoundsUnlike: "machines that round unlike others",
            events.WorkStays: "times false work stayed in the model",
            events.MergeDoubted: "parts of rounds that others did not find the same",
            events.ActRefused: "acts without effect",
            events.PayloadRejected: "updates refused",
            events.AnswersForged: "answers that were not drawn",
            events.StageEmpty: "times nobody held a stage",
            events.HeldDropped: "results without room",
            events.PassageDoubted: "micro-batches that others of the stage could not compute the same",
            events.PassageRefused: "micro-batches that came back otherwise than they were sent",
            events.AccuserDoubted: "accusations that were found wrong",
            events.JoinTooSlow: "lines slower than the run",
            events.StateContradicted: "states that were not the run's",
            events.StatesDiffer: "times members had different states",
            events.CheckpointFailed: "checkpoints not saved",
            events.ReceiptsDiffer: "times two members signed different things of an answer",
        }.items()
    },
}
COLUMN = 9  # of a round's row, that says of which stage it is


@dataclass(frozen=True)
class Section:
    title: str
    texts: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()  # the first row is its head
    code: str = ""
    picture: str = ""  # SVG


def told_of(run: Run, evaluations: Sequence[Evaluation] = ()) -> list[Section]:
    """Return a report's sections.

    Args:
        evaluations: how its models did on tasks, the oldest first.
    """
    tree, now = run.history.whole(), run.history.now
    return [
        Section("In short", tuple(_short(run, tree))),
        *_curves([run], [tree]),
        *_tasks(evaluations),
        Section("Peers", table=_peers(now.peers)),
        *_stages(run, tree),
        *_audits(run),
        Section("Faults survived", *_faults(run, tree)),
        Section("Environment", table=_environment(now.peers)),
        *_configuration(run),
    ]


def _tasks(evaluations: Sequence[Evaluation]) -> Iterator[Section]:
    """Yield a table for each file of tasks: a column for what the run began with, and for each round that was asked."""
    for of in dict.fromkeys(each.digest for each in evaluations):
        columns = sorted(
            (each for each in evaluations if each.digest == of),
            key=lambda each: -1 if each.round is None else each.round,
        )
        named = [("before" if each.round is None else f"round {each.round}", each.results) for each in columns]
        text = f"{printable(columns[0].tasks)}: how many were answered rightly."
        yield Section("Tasks", (text,), table=tuple(table_of(named)))


def table_of(columns: Sequence[tuple[str, Sequence[Result]]]) -> list[tuple[str, ...]]:
    """Return rows for people, the first is the head.

    Args:
        columns: what a model is called, and its results, of the same tasks.
    """
    rows: list[tuple[str, ...]] = [("tasks", "number", *(name for name, _ in columns))]
    for each in zip(*(found for _, found in columns), strict=True):
        name = printable(each[0].kind) or "all"
        rows.append((name, str(each[0].num), *(figures.percent(one.right, one.num) for one in each)))
        if each[0].right_by_length is not None:
            shares = (figures.percent(one.right_by_length or 0, one.num) for one in each)
            rows.append((f"{name}, by bytes", str(each[0].num), *shares))
    return rows


def compared(runs: Sequence[Run]) -> list[Section]:
    """Return the sections of a report on several runs."""
    trees = [run.history.whole() for run in runs]
    of = _listed(sorted({figures.per(run.history.view.loss_of) for run in runs}))
    head = ("run", "tokens", "round", f"loss, {of}", "held-out", "moved", "by", "ring DDP", "time")
    rows = []
    for run, tree in zip(runs, trees, strict=True):
        now = run.history.now
        rows.append(
            (
                run.title,
                f"{now.committed_tokens:,}",
                str(run.history.view.round or 0),
                "-" if now.loss is None else f"{now.loss:.4f}",
                _heldout(_newest(tree)) if tree["heldout"] else "-",
                figures.nbytes(now.moved_nbytes),
                _whose(run),
                figures.ratio(now.ring_nbytes, now.moved_nbytes),
                figures.duration(_took_s(tree)),
            )
        )
    return [Section("Side by side", table=(head, *rows)), *_curves(runs, trees)]


def _short(run: Run, tree: dict[str, Any]) -> list[str]:
    now = run.history.now
    texts = [_extent(run), *_vantage(run, tree)]
    if tree["heldout"]:
        newest, best = _newest(tree), min(tree["heldout"], key=lambda row: row[2])
        is_best = best[2] >= newest[2]
        texts.append(
            f"Held-out loss after round {newest[4]}: {_heldout(newest)}"
            + ("." if is_best else f"; at best, after round {best[4]}: {_heldout(best)}.")
        )
    if now.moved_nbytes:
        moved = f"{_whose(run)} moved {figures.nbytes(now.moved_nbytes)}, sent and received"
        times = figures.times(now.ring_nbytes, now.moved_nbytes)
        ring = (
            f"; for the same rounds ring data-parallel training in bf16 would have moved "
            f"{figures.nbytes(now.ring_nbytes)}{times}."
        )
        texts.append(moved + (ring if now.ring_nbytes else "."))
    return texts


def _heldout(row: Sequence[Any]) -> str:
    """Return the words for a row of held-out losses, which names what was found of answers last."""
    _, _, loss, per_byte, _, *beside = row
    (of_answers,) = beside or [{}]
    pairs = msgspec.convert(of_answers, Preferred) if "accuracy" in of_answers else None
    return figures.heldout(loss, per_byte, pairs, of_answers.get("reward"))


def _extent(run: Run) -> str:
    """Return how far the run has come, by what those say who are heard."""
    now, view = run.history.now, run.history.view
    done = ""
    if now.total_tokens is not None and now.committed_tokens >= now.total_tokens:
        done = f": all of the {now.total_tokens:,} wanted"
    elif now.total_tokens is not None:
        done = f", {figures.percent(now.committed_tokens, now.total_tokens)} of the {now.total_tokens:,} wanted"
    num = len([peer for peer in now.peers if peer.round is not None or peer.counted_tokens])
    peers = several(num, "peer")
    return f"{now.committed_tokens:,} tokens by {peers}, up to round {view.round or 0}{done}."


def _vantage(run: Run, tree: dict[str, Any]) -> list[str]:
    """Return who saw which rounds, and whose word the rest is."""
    peers = run.history.now.peers
    seen: dict[int, list[int]] = {}
    for _, peer, round, *_ in tree["turns"]:
        seen.setdefault(peer, []).append(round)
    if not seen:
        return []
    last = max(map(max, seen.values()))
    spans = [
        f"{_called(run, peers[peer])}{'' if place else ' saw it'} from round {min(rounds)} "
        + ("on" if max(rounds) == last else f"to {max(rounds)}")
        for place, (peer, rounds) in enumerate(sorted(seen.items(), key=lambda item: (min(item[1]), -max(item[1]))))
    ]
    if len(spans) > MAX_SPANS:
        spans = [*spans[:MAX_SPANS], f"{len(spans) - MAX_SPANS} more for parts of it"]
    rounds = several(run.history.now.num_rounds, "round")
    texts = [f"As {_listed(spans)}: {rounds} in {figures.duration(_took_s(tree))}{_gaps(run, seen.values())}."]
    first: list[Any] = min(tree["rounds"], key=lambda row: row[1]) if tree["rounds"] else []
    if first and first[5] > first[4]:
        texts[0] += f" {first[5] - first[4]:,} tokens were counted before that, as members told."
    unseen = [_called(run, peer) for number, peer in enumerate(peers) if number not in seen and not peer.is_heard]
    if unseen:
        texts.append(
            f"There is no log here of {_listed(unseen[:MAX_SPANS])}{' and others' if len(unseen) > MAX_SPANS else ''}: "
            "this report has only what they told others, and what rounds counted. Logs of several homes make one "
            "report: weft report RUN RUN"
        )
    return texts


def _gaps(run: Run, seen: Iterable[Sequence[int]]) -> str:
    """Return which numbers between the first round and the last are of none that was seen."""
    rounds = {round for those in seen for round in those}
    missing = set(range(min(rounds), max(rounds))) - rounds
    opened = {entry.event.round for entry in run.entries if isinstance(entry.event, BranchOpened)} & missing
    number = next(iter(opened), None)
    said = [
        f"round {number} counted nothing: some went on by themselves from there"
        if len(opened) == 1
        else f"{len(opened)} others counted nothing: some went on by themselves from there"
        if opened
        else "",
        f"no log here tells of {several(len(missing - opened), 'other')}" if missing - opened else "",
    ]
    return "".join(f"; {each}" for each in said if each)


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _whose(run: Run) -> str:
    """Return whose bytes are known."""
    heard = [_called(run, peer) for peer in run.history.now.peers if peer.is_heard]
    return _listed(heard) if len(heard) <= MAX_SPANS else f"{len(heard)} peers together"


def _newest(tree: dict[str, Any]) -> list[Any]:
    """Return the row of the newest round that was evaluated, whenever that was told."""
    rows: list[list[Any]] = tree["heldout"]
    return max(rows, key=lambda row: int(row[1]))


def _took_s(tree: dict[str, Any]) -> float:
    times = [row[0] for name in ("events", "rounds", "states") for row in (tree[name][:1] + tree[name][-1:])]
    return max(times) - min(times) if times else 0.0


def _curves(runs: Sequence[Run], trees: Sequence[dict[str, Any]]) -> list[Section]:
    def curves(name: str, x: int, y: int, what: str) -> list[Curve]:
        return [
            Curve(run.title if len(runs) > 1 else what, [(row[x], row[y]) for row in tree[name] if row[y] is not None])
            for run, tree in zip(runs, trees, strict=True)
        ]

    alone = len(runs) == 1
    loss = curves("train", 1, 2, "training") + (curves("heldout", 1, 2, "held-out") if alone else [])
    of = {figures.per(run.history.view.loss_of) for run in runs}
    pictures = [(f"Loss, {_listed(sorted(of))}", "tokens", loss)]
    if not alone:
        pictures.append(("Held-out loss, nats per byte", "tokens", curves("heldout", 1, 3, "")))
    pictures.append(
        (
            f"Bytes moved by {_whose(runs[0])}" if alone else "Bytes moved by the peers heard",
            "tokens",
            curves("bytes", 1, 2, "moved"),
        )
    )
    if alone:
        pictures[-1][2].extend(curves("bytes", 1, 3, "ring DDP"))
    return [
        Section(title, picture=chart(title, across, lines))
        for title, across, lines in pictures
        if any(len(line.points) > 1 for line in lines)
    ]


def _peers(peers: Sequence[PeerNow]) -> tuple[tuple[str, ...], ...]:
    whole = sum(peer.counted_tokens for peer in peers) or 1
    head = (
        "peer",
        "tokens counted",
        "share of all counted",
        "sent",
        "received",
        "missed rounds",
        "tokens/s, training",
        "at last",
    )

    def row(peer: PeerNow) -> tuple[str, ...]:
        own = (figures.nbytes(peer.sent_nbytes), figures.nbytes(peer.received_nbytes), str(peer.num_missed))
        is_counted = peer.is_heard or peer.counted_tokens
        return (
            f"{peer.name} {peer.key[:8]}".strip(),
            f"{peer.counted_tokens:,}" if is_counted else "not heard",
            f"{100 * peer.counted_tokens / whole:.1f} %" if is_counted else "",
            *(own if peer.is_heard else ("not heard", "not heard", "not heard")),
            figures.amount(peer.trained_at_tokens_per_s) if peer.trained_at_tokens_per_s else "-",
            f"{peer.state or '-'}{'' if peer.round is None else f', round {peer.round}'}",
        )

    order = sorted(peers, key=lambda peer: -peer.counted_tokens)
    return (head, *(row(peer) for peer in order if peer.round is not None or peer.is_heard or peer.counted_tokens))


def _stages(run: Run, tree: dict[str, Any]) -> list[Section]:
    stages, peers = run.history.now.stages, run.history.now.peers
    if not stages:
        return []
    rows: dict[int, list[Any]] = {stage: [] for stage in range(len(stages))}
    for row in (*tree["rounds"], *tree["beside"]):
        rows.setdefault(row[COLUMN] if len(row) > COLUMN else 0, []).append(row)
    head = ("stage", "layers", "parameters", "rounds", "peers that counted", "usual samples/s", "usually waiting")
    table = []
    for number, stage in enumerate(stages):
        names = sorted({_called(run, peers[peer]) for row in rows[number] for peer in row[6]})
        seen = [(row[3][number], row[4][number]) for row in tree["stages"] if number < len(row[3])]
        rates = [rate for rate, _ in seen if rate > 0]
        table.append(
            (
                f"{number + 1} of {len(stages)}",
                stage.layers or "-",
                "-" if stage.num_parameters is None else f"{stage.num_parameters:,}",
                str(len(rows[number])) if rows[number] else "not heard",
                ", ".join(names) or "-",
                f"{median(rates):.3g}" if rates else "-",
                f"{median(waiting for _, waiting in seen):.0f}" if seen else "-",
            )
        )
    began = min(row[0] for row in tree["events"]) if tree["events"] else 0.0
    moves = [
        f"{figures.duration(at - began)} {_called(run, peers[peer])} "
        f"{'takes' if is_held else 'leaves'} stage {stage + 1}: {reason}."
        for at, peer, stage, is_held, reason in tree["moves"]
    ]
    more = f"The last {MAX_FAULTS} of {len(moves)} moves." if len(moves) > MAX_FAULTS else ""
    what = (
        "Each stage has its own rounds, which go together. This report shows the rounds, tokens and curves of one "
        "stage: the first, if its peers are among those heard."
    )
    return [Section("Stages", (what, *filter(None, [more]), *moves[-MAX_FAULTS:]), (head, *table))]


def _audits(run: Run) -> list[Section]:
    now, rate = run.history.now, run.history.run.audit_rate
    audits = now.audits
    if rate is None and not audits.num:
        return []
    head = ("peer", "audited", *OUTCOMES, "largest distance")
    rows = [
        (
            _called(run, peer),
            *(f"{num:,}" for num in (found.num, *found.nums)),
            "-" if found.distance is None else f"{found.distance:.2g}",
        )
        for peer in now.peers
        if (found := audits.of.get(PeerId(peer.key))) is not None
    ]
    texts = [share(audits, rate)]
    if any(not peer.is_heard for peer in now.peers):
        texts.append(f"These are the audits that {_whose(run)} made: of those that others made there is no log here.")
    return [Section("Audits", tuple(texts), (head, *rows))]


def _called(run: Run, peer: PeerNow) -> str:
    return run.history.name(PeerId(peer.key))


def _faults(run: Run, tree: dict[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    peers = run.history.now.peers
    faults = [row for row in tree["events"] if row[2] >= WARNING or row[3] in _RETURNS]
    faults = sorted([*faults, *_restarts(run)], key=lambda row: float(row[0]))
    if not faults:
        return ("None was told.",), ()
    counts = Counter(FAULTS.get(row[3], row[3]) for row in faults)
    said = ", ".join(f"{what}: {count}" for what, count in counts.most_common())
    began = tree["events"][0][0]
    told_by = ["" if row[1] is None else _called(run, peers[row[1]]) for row in faults[:MAX_FAULTS]]
    rows = [(figures.duration(row[0] - began), who, row[4]) for row, who in zip(faults, told_by, strict=False)]
    more = f"The first {MAX_FAULTS} of {len(faults)}." if len(faults) > MAX_FAULTS else ""
    texts = (f"{said[0].upper()}{said[1:]}.", more)
    return tuple(filter(None, texts)), (("after", "told by", "what"), *rows)


def _restarts(run: Run) -> list[list[Any]]:
    """Return rows, as of events, of the times when a peer began that had not ended: its log holds no word of that.

    What a process tells before it begins is no word of the one before. Where each stage of a run begins by itself, a
    beginning says nothing.
    """
    found: list[list[Any]] = []
    last: dict[PeerId, tuple[float, bool]] = {}  # of each that has begun: its last word, and whether it has ended
    numbers = {peer.key: number for number, peer in enumerate(run.history.now.peers)}
    for entry in run.entries if not run.history.now.stages else ():
        at, peer, event = entry.at, entry.peer, entry.event
        if isinstance(event, BEFORE_IT_BEGINS):
            continue
        before, has_ended = last.get(peer, (0.0, True))
        if isinstance(event, PeerStarted) and not has_ended:
            after = figures.seconds(at - before)
            text = f"{run.history.name(peer)} begins again, {after} after its last word: it was killed, or failed"
            found.append([at, numbers.get(peer), WARNING, _RESTART, text])
        if isinstance(event, PeerStarted | PeerStopped) or peer in last:
            last[peer] = at, isinstance(event, PeerStopped) or (has_ended and not isinstance(event, PeerStarted))
    return found


def _environment(peers: Sequence[PeerNow]) -> tuple[tuple[str, ...], ...]:
    counts = Counter((peer.device, peer.software) for peer in peers if peer.software)
    return (("peers", "device", "software"), *((str(count), *what) for what, count in counts.most_common()))


def _configuration(run: Run) -> list[Section]:
    """Return what the run's peers share, and how to do it again."""
    shared = run.shared
    if shared is None:
        return [Section("Configuration", ("It is not on this machine; members of the run have it.",))]
    digest = (
        f"Everything that its peers share. Its digest names the run: {run.digest}. Digests also name data and "
        f"tokenizer. {_spelled_out(run)}"
    )
    sections = [Section("Configuration", (in_words(shared.method), digest), code=dump(shared))]
    if isinstance(shared, RunConfig):
        sections.append(_recipe(run, shared))
    return sections


def _spelled_out(run: Run) -> str:
    """Return why the method there has another type than the one that was asked for."""
    asked = None if run.file is None else str(run.file.method.__struct_config__.tag)
    what = f"The run was made with the method {asked}" if asked not in (None, "custom") else "A method such as diloco"
    return f'{what}, which stands for choices: these are below, as type = "custom".'


def _recipe(run: Run, shared: RunConfig) -> Section:
    """Return a run file that makes the same run, and what is to be done where it cannot know all."""
    moved: tuple[str, ...] = ()
    if run.file is not None:
        file, moved = without_places(run.file)
    else:
        file = run_file_of(shared, max(1, sum(peer.round is not None for peer in run.history.now.peers)))
    texts = [
        "Save this as again.toml, and start: weft train again.toml. It makes the same run: `run` is its digest. If the "
        "text or anything else differs, weft train says what, and begins nothing. A home that already has the run "
        "goes on with it. To begin anew, name another home with --home."
    ]
    if moved:
        texts.append(f"Copy these beside it, from where they were: {', '.join(moved)}.")
    if run.file is None:
        texts.append(_to_be_named(shared, file))
    return Section("To repeat it", tuple(texts), code=text_of(file))


def _to_be_named(shared: RunConfig, file: RunFile) -> str:
    """Return what a run file lacks that is not of the home of who made the run."""
    data = shared.data
    kind = "text" if data.rows is UNSET else data.rows.what
    text = f"{data.train_text_nbytes:,} bytes to train on and {data.heldout_text_nbytes:,} held out"
    source = (
        "the files that each peer trains on, under [data]."
        if shared.is_private
        else f"the {kind}, {text}, under [data.source], and heldout_fraction under [data]."
    )
    exported = [name for name in (MODEL, TOKENIZER, ADAPTER, SPACE) if f'"{name}"' in dump(file)]
    beside = f" Put beside it {' and '.join(exported)}, as weft export writes them." if exported else ""
    if isinstance(file.model, SpaceModel):
        beside += f" {SPACE} is what weft compose space writes."
        if file.model.member is not None:
            beside += f" {MODEL} is the member that its layers began as, and not what they have become."
    elif shared.base is not UNSET:
        beside += f" {MODEL} is the folder that the adapter was trained beside, and not what it has become."
    if isinstance(file.adapter, FolderAdapter):
        beside += f" {ADAPTER} is the adapter's folder as it was before the run."
    return (
        "Peers do not tell each other where their files are; only the report of the home that made the run has that. "
        f"Name it yourself: {source}{beside}"
    )


# --- as text ---


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Return a report as Markdown, without its pictures."""
    parts = [f"# {_plain(title)}"]
    for section in sections:
        if section.picture and not section.texts:
            continue
        parts.append(f"## {section.title}")
        parts += map(_plain, section.texts)
        if len(section.table) > 1:
            lines = [f"| {' | '.join(map(_plain, row))} |" for row in section.table]
            parts.append("\n".join([lines[0], "|" + " --- |" * len(section.table[0]), *lines[1:]]))
        if section.code:
            parts.append(f"```toml\n{section.code.rstrip()}\n```")
    return "\n\n".join([*parts, _MARK]) + "\n"


def is_report(text: str) -> bool:
    """Return whether a text is such a report: nothing else is written over."""
    return text.endswith(f"\n\n{_MARK}\n") or f"<footer>{_MARK}, " in text[-200:]


def _plain(text: str) -> str:
    """Return words that Markdown takes for words."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in text.replace("\n", " "))


_MARK = "weft report"  # the last words of one
_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --dim: #5b6675; --line: #d9dee5; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --dim: #98a3b3; --line: #333c48; --back: #14181e; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
body { margin: 2rem auto; padding: 0 1rem; max-width: 60rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; }
pre { background: color-mix(in srgb, var(--line) 35%, transparent); padding: 1rem; overflow-x: auto; }
h1, h2, p { overflow-wrap: anywhere; }
@media (max-width: 640px) { body { margin: 1rem auto; } svg text { font-size: 22px; } }
svg { width: 100%; height: auto; } footer { color: var(--dim); margin-top: 3rem; font-size: .9rem; }
"""


def html(title: str, sections: Sequence[Section], made_at: float) -> str:
    """Return a report as one HTML file.

    Args:
        made_at: seconds since 1970.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<section><h2>{escape(section.title)}</h2>")
        parts += [f"<p>{escape(text)}</p>" for text in section.texts]
        parts.append(section.picture)
        if len(section.table) > 1:
            head, *rows = section.table
            parts.append(f'<div class="wide" tabindex="0"><table><thead>{_row(head, "th")}</thead><tbody>')
            parts += [_row(row, "td") for row in rows]
            parts.append("</tbody></table></div>")
        if section.code:
            parts.append(f'<pre tabindex="0">{escape(section.code)}</pre>')
        parts.append("</section>")
    when = datetime.fromtimestamp(made_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head>\n<body>\n<main>{body}</main>\n"
        f"<footer>{_MARK}, {when}</footer>\n</body>\n</html>\n"
    )


def _row(cells: Sequence[str], kind: str) -> str:
    scope = ' scope="col"' if kind == "th" else ""
    return "<tr>" + "".join(f"<{kind}{scope}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"
