"""What a run came to, in one file that can be sent around: HTML, or Markdown.

    configuration, curves, peers and what each contributed, bytes, faults survived, environment, how to repeat it

Of several runs (`compared`) the curves lie over each other. Pictures are SVG inside the file; it asks no host for
anything, and holds no address, path or ticket.

Pure: figures in, text out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from statistics import median
from typing import Any

from weft.config import dump
from weft.dashboard import figures
from weft.dashboard.chart import Curve, chart
from weft.dashboard.history import PeerNow
from weft.dashboard.run import Run
from weft.dashboard.words import WARNING, in_words
from weft.ids import PeerId
from weft.run.amend import MODEL, TOKENIZER, run_file_of
from weft.run.config import RunConfig

MAX_FAULTS = 40  # that are told one by one, and moves
COLUMN = 9  # of a round's row, that says of which stage it is


@dataclass(frozen=True)
class Section:
    title: str
    texts: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()  # the first row is its head
    code: str = ""
    picture: str = ""  # SVG


def told_of(run: Run) -> list[Section]:
    """Return a report's sections."""
    tree, now = run.history.whole(), run.history.now
    return [
        Section("In short", tuple(_short(run, tree))),
        *_curves([run], [tree]),
        Section("Peers", table=_peers(now.peers)),
        *_stages(run, tree),
        Section("Faults survived", *_faults(run, tree)),
        Section("Environment", table=_environment(now.peers)),
        *_configuration(run),
    ]


def compared(runs: Sequence[Run]) -> list[Section]:
    """Return the sections of a report on several runs."""
    trees = [run.history.whole() for run in runs]
    head = ("run", "tokens", "rounds", "loss", "held-out, nats per byte", "bytes moved", "of ring DDP", "time")
    rows = []
    for run, tree in zip(runs, trees, strict=True):
        now = run.history.now
        heldout = f"{tree['heldout'][-1][3]:.4f}" if tree["heldout"] else "-"
        rows.append(
            (
                run.title,
                f"{now.committed_tokens:,}",
                str(now.num_rounds),
                "-" if now.loss is None else f"{now.loss:.4f}",
                heldout,
                figures.nbytes(now.moved_nbytes),
                _share(now.moved_nbytes, now.ring_nbytes),
                figures.duration(_took_s(tree)),
            )
        )
    return [Section("Side by side", table=(head, *rows)), *_curves(runs, trees)]


def _short(run: Run, tree: dict[str, Any]) -> list[str]:
    now = run.history.now
    texts = [
        f"{now.committed_tokens:,} tokens in {now.num_rounds} rounds and {figures.duration(_took_s(tree))}, by "
        f"{len([peer for peer in now.peers if peer.round is not None])} peers."
    ]
    if tree["heldout"]:
        _, _, loss, per_byte = tree["heldout"][-1]
        best = min(row[3] for row in tree["heldout"])
        texts.append(
            f"Held-out loss {loss:.4f} nats per token, {per_byte:.4f} nats per byte at the end, {best:.4f} at best."
        )
    if now.ring_nbytes:
        times = figures.ratio(now.ring_nbytes, now.moved_nbytes)
        texts.append(
            f"The peers heard moved {figures.nbytes(now.moved_nbytes)}, both ways; ring data-parallel training in bf16 "
            f"would have moved {figures.nbytes(now.ring_nbytes)}: {times} as much."
        )
    return texts


def _took_s(tree: dict[str, Any]) -> float:
    times = [row[0] for name in ("events", "rounds", "states") for row in (tree[name][:1] + tree[name][-1:])]
    return max(times) - min(times) if times else 0.0


def _share(part: float, whole: float) -> str:
    return f"1/{whole / part:.3g}" if part > 0 and whole > 0 else "-"


def _curves(runs: Sequence[Run], trees: Sequence[dict[str, Any]]) -> list[Section]:
    def curves(name: str, x: int, y: int, what: str) -> list[Curve]:
        return [
            Curve(run.title if len(runs) > 1 else what, [(row[x], row[y]) for row in tree[name] if row[y] is not None])
            for run, tree in zip(runs, trees, strict=True)
        ]

    alone = len(runs) == 1
    loss = curves("train", 1, 2, "training") + (curves("heldout", 1, 2, "held-out") if alone else [])
    pictures = [("Loss, nats per token", "tokens", loss)]
    if not alone:
        pictures.append(("Held-out loss, nats per byte", "tokens", curves("heldout", 1, 3, "")))
    pictures.append(("Bytes moved by the peers heard", "tokens", curves("bytes", 1, 2, "moved")))
    if alone:
        pictures[-1][2].extend(curves("bytes", 1, 3, "ring DDP"))
    return [
        Section(title, picture=chart(title, across, lines))
        for title, across, lines in pictures
        if any(len(line.points) > 1 for line in lines)
    ]


def _peers(peers: Sequence[PeerNow]) -> tuple[tuple[str, ...], ...]:
    whole = sum(peer.counted_tokens for peer in peers) or 1
    head = ("peer", "tokens counted", "share", "sent", "received", "missed rounds", "speed, tokens/s")
    rows = [
        (
            f"{peer.name} {peer.key[:8]}".strip(),
            *(
                (
                    f"{peer.counted_tokens:,}",
                    f"{100 * peer.counted_tokens / whole:.1f} %",
                    figures.nbytes(peer.sent_nbytes),
                    figures.nbytes(peer.received_nbytes),
                    str(peer.num_missed),
                )
                if peer.is_heard
                else ("not heard",) + ("",) * 4
            ),
            figures.amount(peer.tokens_per_s),
        )
        for peer in sorted(peers, key=lambda peer: -peer.counted_tokens)
        if peer.round is not None or peer.is_heard
    ]
    return (head, *rows)


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


def _called(run: Run, peer: PeerNow) -> str:
    return run.history.name(PeerId(peer.key))


def _faults(run: Run, tree: dict[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    peers = run.history.now.peers
    faults = [row for row in tree["events"] if row[2] >= WARNING]
    if not faults:
        return ("None was told.",), ()
    counts = ", ".join(f"{count} x {kind}" for kind, count in Counter(row[3] for row in faults).most_common())
    began = tree["events"][0][0]
    told_by = ["" if row[1] is None else _called(run, peers[row[1]]) for row in faults[:MAX_FAULTS]]
    rows = [(figures.duration(row[0] - began), who, row[4]) for row, who in zip(faults, told_by, strict=False)]
    more = f"The first {MAX_FAULTS} of {len(faults)}." if len(faults) > MAX_FAULTS else ""
    return tuple(text for text in (f"{counts}.", more) if text), (("after", "told by", "what"), *rows)


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
        "tokenizer."
    )
    sections = [Section("Configuration", (in_words(shared.method), digest), code=dump(shared))]
    if isinstance(shared, RunConfig):
        num_peers = max(1, sum(peer.round is not None for peer in run.history.now.peers))
        sections.append(
            Section(
                "To repeat it",
                (
                    "Save this as again.toml, and start: weft train again.toml. It names the default corpus: if the "
                    "run read other text, name that under [data.source], and its heldout_fraction under [data]. The "
                    f"same text, cut the same way, gives the same run, by its digest. {MODEL} and {TOKENIZER}, where "
                    "they are named, are those that weft export writes.",
                ),
                code=dump(run_file_of(shared, num_peers)),
            )
        )
    return sections


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
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Return words that Markdown takes for words."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in text.replace("\n", " "))


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
        f"<footer>weft report, {when}</footer>\n</body>\n</html>\n"
    )


def _row(cells: Sequence[str], kind: str) -> str:
    scope = ' scope="col"' if kind == "th" else ""
    return "<tr>" + "".join(f"<{kind}{scope}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"
