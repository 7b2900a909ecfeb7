"""`weft train notes.txt`, `weft train chats.jsonl`: four questions, and a run file of the answers beside the text.

a file that ends in .toml, or a TOML table with [train]    a run file
any other file, or a folder                                own text: as `--data` reads it, by the files' names
neither file nor folder                                    a run of this home, gone on with as it is

The same text again finds the run file that was made for it, or that somebody wrote for it, and asks nothing.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
import typer

from weft import reading
from weft.cli.home import called, on_disk, own_name, runs_of
from weft.cli.options import Length, length
from weft.cli.own.after import Learnt, is_held, numbered, say_found, say_made, write_new
from weft.cli.own.ask import Asks
from weft.cli.settings import changes_of, run_file
from weft.cli.terminal import tell
from weft.config import from_tree, is_in, leave_out, leaves, load_tree
from weft.dashboard import figures
from weft.dashboard.logs import is_there
from weft.errors import ConfigError
from weft.ids import several, short

if TYPE_CHECKING:
    from weft.cli.own.subject import Rows
    from weft.plan.own_chats import Chats
    from weft.plan.own_text import Text
    from weft.run.machine import PeerConfig

MAX_RUN_FILE_NBYTES = 1 << 20  # larger text is no run file
USUAL_S = 3600.0  # of training at most, unless more is asked for
MAX_PEERS = 64
_QUESTIONS = {"name": "--run-name", "peers": "--peers", "train.tokens": "--length"}


@dataclass(frozen=True)
class Wishes:
    """What `weft train` asks of somebody's own text."""

    run_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="For your own text: name of the run. Default: that of the file.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="For your own conversations: the chat model to tune, a Hugging Face folder.", metavar="FOLDER"
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(help="For your own text: nano, tiny, 35m, 150m or 400m. Default: what the text can fill."),
    ] = None
    length: Annotated[
        str | None,
        typer.Option(help="For your own text: 2h, 5Mtokens or 10passes. Default: at most an hour.", metavar="WHAT"),
    ] = None
    peers: Annotated[
        int | None,
        typer.Option(
            help="For your own text: number of machines; training begins once all are here.", min=1, max=MAX_PEERS
        ),
    ] = None
    yes: Annotated[bool, typer.Option("--yes", "-y", help="For your own text: ask nothing, take the defaults.")] = False

    def given(self) -> list[str]:
        """Return the options of a question that were given."""
        pairs = {
            "--run-name": self.run_name,
            "--model": self.model,
            "--size": self.size,
            "--length": self.length,
            "--peers": self.peers,
        }
        return [option for option, value in pairs.items() if value is not None]

    @property
    def all_given(self) -> list[str]:
        """Return the options that were given, --yes included."""
        return [*self.given(), *(["--yes"] if self.yes else [])]

    def refuse_for_run_file(self) -> None:
        """
        Raises:
            ConfigError: one was given, which has no effect on a run file.
        """
        if given := self.all_given:
            raise ConfigError(
                f"{', '.join(given)}: no effect on a run file, only on your own text. Leave "
                f"{'it' if len(given) == 1 else 'them'} out; --set changes a run file."
            )


def kind_of(given: str) -> Literal["run file", "text", "run"]:
    """Return what `weft train` was given.

    Raises:
        ConfigError: a ticket, or a folder of something else.
    """
    path = Path(given)
    if re.match(r"\s*weft\d", given) and not is_there(path):
        raise ConfigError("`weft train` was given a ticket. To join its run: weft join -")
    if not is_there(path):
        return "run"
    if path.is_dir():
        _refuse_folder(path)
        return "text"
    return "run file" if path.suffix.lower() == ".toml" or not path.is_file() or _is_run_table(path) else "text"


def _is_run_table(path: Path) -> bool:
    """Return whether a file whose name does not say so holds a run file."""
    try:
        if path.stat().st_size > MAX_RUN_FILE_NBYTES:
            return False
        return isinstance(reading.toml_of(path.read_bytes()).get("train"), dict)
    except (OSError, ValueError):
        return False


def _refuse_folder(path: Path) -> None:
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} holds a model, not text. To train it further, name it in a run file: "
            'model = {type = "folder", path = "..."} (docs/run_file.md).'
        )
    files = [each for each in path.iterdir() if not each.name.startswith(".")]
    if files and all(each.suffix.lower() == ".toml" for each in files):
        names = ", ".join(sorted(each.name for each in files)[:8])
        raise ConfigError(f"{path} holds run files: {names}. Name the one to train.")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What else is asked of a text.

    Args:
        changes: of `--set`: written into a file that is made, else for the caller to make.
        is_new: make another, though there is one.
        is_longer: `--length` is for a run that goes on.
        before: make one that begins with what this has learnt.
        home: holds runs that were begun by run files of the text.
    """

    changes: Sequence[str] = ()
    is_new: bool = False
    is_longer: bool = False
    before: Learnt | None = None
    home: Path


@dataclass(frozen=True, kw_only=True)
class RunFileOf:
    """The run file of a text.

    Args:
        changes: still to be made of what it says.
        is_made: just now.
    """

    path: Path
    changes: Sequence[str]
    peers: int
    is_made: bool = False


def run_file_for(text: Path, wishes: Wishes, asked: Asked, settings: "PeerConfig") -> RunFileOf:
    """Return the run file of a text, made now where there is none; of several the newest by which the home holds a run.

    Raises:
        ConfigError: nobody answers, or an answer makes no sense; DataError: the text cannot be read, or is too little.
    """
    if wishes.length is not None:
        length("--length", wishes.length)  # what is no length is refused before anything else
    all_there, before, changes = list(existing(text)), asked.before, list(asked.changes)
    there = [each for each in all_there if before is None or before.begins(each)]
    if there and not asked.is_new:
        begun = [each for each in there if is_held(each, asked.home)]
        path = (begun or there)[-1]
        if not begun and (given := [*(["--go-on"] if asked.is_longer else []), *wishes.given()]):
            raise ConfigError(_not_begun(given, path, text, asked))
        if wishes.given() == ["--length"] and asked.is_longer:
            longer = _longer(text, path, str(wishes.length), asked.home)
            if twice := changes_of(longer).keys() & changes_of(changes).keys():
                raise ConfigError(f"--length and --set {min(twice)} exclude each other. Give one.")
            changes += longer
        elif given := wishes.given():
            raise ConfigError(_already(given, path, text, asked))
        if before is None:
            tell(f"{path} says how to train {text}; weft uses that{_other_files(there, path, asked.home)}")
        else:
            say_found(path)
        return RunFileOf(path=path, changes=changes, peers=run_file(path, changes).peers)
    path, tree = _made(text, wishes, asked, settings, num_before=len(all_there))
    if all_there:
        how = "--new" if before is None else f"--after {short(before.run)}"
        tell(
            f"{all_there[-1]} stays as it is, and this run has none of its settings; a run with them: weft train "
            f"{shlex.quote(str(all_there[-1]))} {how}"
        )
    if before is None:
        tell(f"run file: {path}")
    else:
        say_made(path, str(tree["name"]), before)
    return RunFileOf(path=path, changes=(), peers=int(tree["peers"]), is_made=True)


def _other_files(there: Sequence[Path], path: Path, home: Path) -> str:
    """Return which run files of a text are left aside, of those that are there, the newest last."""
    at = there.index(path)
    older, newer = there[:at], there[at + 1 :]
    said = f". There are older ones: {', '.join(map(str, older))}" if older else ""
    if newer:
        makes = "makes another run" if len(newer) == 1 else "make other runs"
        said += f". {', '.join(map(str, newer))} {makes}, and {home} holds nothing of that: name the file to train it"
    return said


def _not_begun(given: Sequence[str], path: Path, text: Path, asked: Asked) -> str:
    """Return that a run file of which the home holds no run answers already what is answered again, and what to do.

    Args:
        given: options of questions, and --go-on.
    """
    leave, new = "leave them out" if len(given) > 1 else "leave it out", "--new"
    if asked.is_longer:
        new += " in the place of --go-on"
    return (
        f"{', '.join(given)}: {path} already says how to train {text}, and {asked.home} holds no run that it made. "
        f"Nothing was started. To begin as that file says, {leave}. To answer the questions anew, remove that file, or "
        f"add {new}. If the run is in another home, name that: weft --home FOLDER."
    )


def _already(given: Sequence[str], path: Path, text: Path, asked: Asked) -> str:
    """Return that a run file answers already what is answered again, and what to do.

    Args:
        given: options of questions.
    """
    said = f"{', '.join(given)}: {path} already says how to train {text}. "
    if asked.before is None and "--length" in given:
        alone = "" if given == ["--length"] else ", without the others"
        how = "leave out the others" if asked.is_longer else f"add --go-on{alone}"
        said += f"To go on with the run for so long, counted from its first round, {how}. "
    file = shlex.quote(str(path))
    if asked.is_longer:
        return f"{said}For anything else, change that file; then: weft train {file} --go-on"
    if asked.before is not None:
        return f"{said}To change that run, change that file. For another one that begins so, add --new."
    return f"{said}For another run of this text, which begins anew, add --new."


def _longer(text: Path, path: Path, wanted: str, home: Path) -> list[str]:
    """Return what to change of a run file so that the run is so long in all.

    Raises:
        ConfigError: it cannot be so long: the run has counted as much already, say.
    """
    from weft.cli.own.subject import text_source
    from weft.plan import own_text
    from weft.run.config import RunFile

    meant, tree = length("--length", wanted), load_tree(path)
    is_chat = tree.get("data", {}).get("source", {}).get("type") in ("conversations", "preferences")
    is_bytes = tree.get("tokenizer", {}).get("type") == "bytes" and not is_chat
    if meant.seconds is not None:
        raise ConfigError(
            f"--length {wanted[:40]}: of a run that goes on, weft takes tokens or passes, of the run from its first "
            "round: 5Mtokens, 10passes."
        )
    if meant.passes is not None and not is_bytes:
        raise ConfigError(
            f"--length {wanted[:40]}: by {path} tokens are no bytes, so weft cannot tell how many a pass has. "
            "Give the length in tokens: 5Mtokens."
        )
    if meant.passes is not None:
        whole = _whole(text)
        found = own_text.read_text(text_source(whole, {}), whole.parent)
        tokens = own_text.rounded(int(_tokens(meant, found, 0)))
    else:
        tokens = own_text.rounded(meant.tokens or 0)
    run, counted = _least_counted(str(tree.get("name")), home)
    least = own_text.least_tokens(from_tree(tree, RunFile, where=str(path)))
    if run is not None and tokens < counted + least:
        left = "nothing" if tokens <= counted else f"less than a round, of {several(least, 'token')},"
        more = own_text.rounded_up(max(2 * counted, counted + least))
        raise ConfigError(
            f"--length {wanted[:40]}: run {called(run)} has already counted {several(counted, 'token')}, and --length "
            f"is the length of the whole run from its first round: {several(tokens, 'token')} would leave {left} to "
            f"train. Nothing was started. Give more, such as --length {figures.amount(more)}tokens. To begin another "
            "run of this text, leave out --go-on and add --new."
        )
    fields, schedule = ["train.tokens"], tree["train"].get("schedule", {})
    least = sum(int(schedule.get(name, 0)) for name in ("warmup_tokens", "decay_tokens"))
    if tokens < least:
        raise ConfigError(
            f"--length {wanted[:40]}: that is {tokens:,} tokens, and by {path} the learning rate takes {least:,} to "
            f"rise and to fall. Give at least so many, or lower warmup_tokens and decay_tokens in that file."
        )
    if "total_tokens" in schedule:
        fields.append("train.schedule.total_tokens")
    return [f"{field}={tokens}" for field in fields]


def _least_counted(name: str, home: Path) -> tuple[Path | None, int]:
    """Return which run of that name has counted least in a home, and how many tokens; of none that trained, None."""
    found = [(on_disk(run).standing, run) for run in runs_of(home) if own_name(run) == name]
    trained = [(stands.committed_tokens, run) for stands, run in found if stands is not None and stands.round]
    counted, run = min(trained, default=(0, None))
    return run, counted


# --- where it lies ---


def existing(text: Path) -> Iterator[Path]:
    """Yield the run files beside a text, or here, that train just this text; the newest last."""
    for folder in _folders(text):
        for path in takewhile(Path.exists, numbered(folder, _stem(text))):
            if _is_of(path, text):
                yield path


def _whole(text: Path) -> Path:
    """Return a path from the root, without following links: a run file lies beside the name that was given."""
    return Path(os.path.abspath(text))


def _folders(text: Path) -> list[Path]:
    whole, here = _whole(text), Path.cwd()
    return [whole.parent, *([here] if here != whole.parent and not here.is_relative_to(whole) else [])]


def _stem(text: Path) -> str:
    name = _whole(text).name
    return name.partition(".")[0] or name.strip(".") or "mytext"


def _is_of(path: Path, text: Path) -> bool:
    try:
        source = load_tree(path)["data"]["source"]
        return [(path.parent / each).resolve() for each in source["paths"]] == [text.resolve()]
    except (ConfigError, KeyError, TypeError):
        return False


def _as_file(text: Path, tree: dict[str, Any], folder: Path) -> bytes:
    """Return a run file of a text for that folder."""

    def seen(path: Path) -> str:
        return path.name if path.parent == folder else str(path)

    source = tree["data"]["source"]
    recipe = {"conversations": "chat-lora.toml", "preferences": "prefer.toml"}.get(source["type"], "mytext.toml")
    source["paths"] = [seen(_whole(text))]
    for table in (tree["model"], tree["tokenizer"]):
        if os.path.isabs(path := table.get("path", "")):
            table["path"] = seen(Path(path))
    head = (
        f"# Made by `weft train {text.name}`, which goes on with it. docs/run_file.md has all fields,\n"
        f"# recipes/{recipe} the reasons. If you change it, `weft train` says what that means for the run.\n"
    )
    return (head + tomli_w.dumps(tree)).encode()


def _write(text: Path, tree: dict[str, Any]) -> Path:
    """Write a run file where there is none yet, beside the text, or here where that cannot be, and return where."""
    refused: OSError | None = None
    for folder in _folders(text):
        data = _as_file(text, tree, folder)
        for path in numbered(folder, _stem(text)):
            try:
                with path.open("xb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            except OSError as error:
                refused = refused or error
                break
            return path
    raise ConfigError(
        f"weft cannot write a run file beside {text} or in {Path.cwd()}: "
        f"{'' if refused is None else refused.strerror}. Change to a folder of yours, and try again."
    )


# --- what is asked ---


def _made(
    text: Path, wishes: Wishes, asked: Asked, settings: "PeerConfig", num_before: int
) -> tuple[Path, dict[str, Any]]:
    if asked.before is None:
        return _answered(text, wishes, asked, settings, num_before)
    for option, value in {"--size": wishes.size, "--model": wishes.model}.items():
        if value is not None:
            raise ConfigError(f"{option}: no effect with --after: the model is what {asked.before}. Leave it out.")
    with _placed(text, asked.before) as path:
        return _answered(text, wishes, asked, settings, num_before, path)


@contextmanager
def _placed(text: Path, before: Learnt) -> Iterator[Path]:
    """Write the model that a run begins with, as `Learnt.placed`, beside the text, or here where that cannot be."""
    folder = next((each for each in _folders(text) if os.access(each, os.W_OK)), None)
    if folder is None:
        raise ConfigError(f"weft can write neither beside {text} nor in {Path.cwd()}. Change to a folder of yours.")
    with before.placed(numbered(folder, _stem(text))) as path:
        yield path


def _answered(
    text: Path, wishes: Wishes, asked: Asked, settings: "PeerConfig", num_before: int, path: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Ask, and write the run file.

    Args:
        path: of the run file, where a model to begin with lies beside it.
    """
    changes, whole = asked.changes, _whole(text)
    changed = changes_of(changes)
    from weft.cli.own import subject as subjects
    from weft.cli.plan.this_machine import ThisMachine, about
    from weft.plan import own_text
    from weft.run.config import RunFile
    from weft.run.idle import without_effect
    from weft.sync.records.acts import MAX_TOKENS

    rows = None if _is_told(changed) else subjects.kind_of_file(whole, has_model=wishes.model is not None)
    _require_of_kind(text, rows, wishes, asked)
    _check_questions(changed, rows, asked.before)
    model = () if asked.before is not None else ("--size",) if rows is None else ("--model",)
    questions = ("--run-name", *model, "--peers", "--length")
    about_what = f"how to train {'this text' if rows is None else 'on these conversations'}"
    asks = Asks(is_on=not wishes.yes, questions=questions, given=wishes.given(), about=about_what)
    given = subjects.Given(
        what=whole,
        changes=changes,
        before=asked.before,
        path=path,
        size=wishes.size,
        model=wishes.model,
        home=asked.home,
    )
    machine = ThisMachine(settings)
    subject: subjects.Subject = (
        subjects.OwnText(given, machine) if rows is None else subjects.OwnChats(given, rows, asks)
    )
    found = subject.found
    tell(f"{text}: {subject.said}")

    usual_name = own_text.run_name(whole)
    usual_name = usual_name if not num_before else f"{usual_name[:60]}-{num_before + 1}"
    name = asks.ask("name of the run", wishes.run_name, usual_name, _name)

    def described_by(tokens: int, peers: int) -> tuple[dict[str, Any], RunFile]:
        tree = subjects.changed_tree(subject.tree(name, tokens, peers), changes)
        where = " ".join(f"--set {change}" for change in changes) or str(text)
        return tree, from_tree(tree, RunFile, where=where)

    def checked(given: str, peers: int, tokens_per_s: float | None) -> int:
        """Return how many tokens are meant; of a while that needs to be known how fast this machine is."""
        tokens = own_text.rounded(int(_tokens(length("--length", given), found, peers * (tokens_per_s or 0.0))))
        if tokens > MAX_TOKENS:
            raise ConfigError(
                f"--length {given[:40]}: these are {tokens:,} tokens, and a run has at most {MAX_TOKENS:,}."
            )
        described = described_by(tokens, peers)[-1]
        if tokens < (least := own_text.least_tokens(described)):
            enough = own_text.rounded_up(least)
            takes = f", which take {about(enough / (peers * tokens_per_s))}" if tokens_per_s else ""
            raise ConfigError(
                f"--length {given[:40]}: that is {several(tokens, 'token')}, and with less than {least:,}, about a "
                f"round, the learning rate is back at 0 before much is learnt. Give at least {figures.amount(enough)}"
                f"tokens{takes}."
            )
        return own_text.whole_rounds(tokens, described)

    is_told = rows is not None and (wishes.yes or wishes.peers is not None)
    if wishes.length is not None and is_told and length("--length", wishes.length).seconds is None:
        checked(wishes.length, _peers(str(wishes.peers or 1)), None)  # timing this machine takes minutes
    here = subject.choose(asks, machine)
    peers = asks.ask(
        "number of machines that train, this one included: with more than 1, training waits until all are here",
        None if wishes.peers is None else str(wishes.peers),
        "1",
        _peers,
    )
    usual_tokens = subject.usual_tokens(peers * here.tokens_per_s, USUAL_S)
    least = own_text.least_tokens(described_by(usual_tokens, peers)[-1])
    usual_tokens = max(usual_tokens, own_text.rounded_up(least))
    who = "this machine trains" if peers == 1 else f"{peers} machines as fast as this one train"
    tokens = asks.ask(
        f"how long: a while (2h), tokens (5Mtokens) or passes over the {found.kind} (10passes); {who} at "
        f"{figures.amount(peers * here.tokens_per_s)} tokens/s",
        wishes.length,
        f"{figures.amount(usual_tokens)}tokens",
        lambda given: checked(given, peers, here.tokens_per_s),
    )
    tree, described = described_by(tokens, peers)
    for field in without_effect(described):  # of what weft writes; what somebody gave stays, and is told
        tree = tree if any(is_in(name, field) for name, _ in leaves(changed)) else leave_out(tree, field)
    for note in subject.notes(described):
        tell(note)
    here = machine.pace_of(described, subject.base) if changed else here  # --set may have made another model of it
    for line in machine.takes(described, here, subject.base, found):
        typer.echo(line, err=True)
    if path is None:
        return _write(text, tree), tree
    write_new(path, _as_file(text, tree, path.parent))
    return path, tree


def _is_told(changed: dict[str, Any]) -> bool:
    """Return whether somebody said where rows have text."""
    return not {"data.source.field", "data.source.column"}.isdisjoint(changed)


def _require_of_kind(text: Path, rows: "Rows | None", wishes: Wishes, asked: Asked) -> None:
    """
    Raises:
        ConfigError: an option is given that has no effect on what the files hold.
    """
    if rows is None and wishes.model is not None:
        raise ConfigError(
            f"--model: no effect here: {text} is text, and --model names what conversations tune. To train that model "
            'further on a text, name it in a run file: model = {type = "folder", path = "..."} (docs/run_file.md).'
        )
    if rows is not None and wishes.size is not None:
        raise ConfigError(
            f"--size: no effect here: {text} holds conversations, which tune a model that is there already. Name that "
            "with --model FOLDER in its place."
        )
    if rows is not None and wishes.yes and wishes.model is None and asked.before is None:
        raise ConfigError(
            f"{text} holds conversations, which tune a chat model, and weft cannot choose that for you. Name its "
            "Hugging Face folder: --model FOLDER."
        )


def _check_questions(changed: dict[str, Any], rows: "Rows | None", before: Learnt | None) -> None:
    """
    Raises:
        ConfigError: --set says what a question asks, or what the run before says.
    """
    of_model = {"model.size": "--size"} if rows is None else {"model.path": "--model", "tokenizer.path": "--model"}
    for dotted in changed:
        if before is not None and dotted.partition(".")[0] in ("model", "tokenizer"):
            raise ConfigError(f"--set {dotted}: the model is what {before}. Leave it out.")
        if dotted in (questions := _QUESTIONS | of_model):
            raise ConfigError(f"--set {dotted}: for your own text, {questions[dotted]} says that. Give it instead.")


def _name(given: str) -> str:
    if not re.fullmatch(r"[\w .-]{1,64}", given):
        raise ConfigError(
            f"--run-name {given[:80]}: no run may be called so. Allowed: at most 64 letters, digits, spaces and _.-"
        )
    return given


def _peers(given: str) -> int:
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:6]) <= MAX_PEERS:
        raise ConfigError(
            f"--peers {given[:40]}: that is no number of machines. Allowed: a whole number from 1 to {MAX_PEERS}."
        )
    return int(given)


def _tokens(meant: Length, text: "Text | Chats", tokens_per_s: float) -> float:
    if meant.seconds is not None:
        return meant.seconds * tokens_per_s
    if meant.passes is not None:
        return meant.passes * text.train_tokens
    return meant.tokens or 0
