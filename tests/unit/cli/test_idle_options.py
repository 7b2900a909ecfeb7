"""Every option of every verb, where it would change nothing: it is refused with the reason, or named in one line.

The options are read from the argument parser. One without a row here fails: whoever adds an option says where it does
nothing, or that it always does something.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from unit.cli.small import Weft
from unit.cli.test_bad_input import a_ticket
from weft.cli.home import Place
from weft.cli.main import make_app
from weft.keys import open_identity

UNIT = Path(__file__).parents[1]
RUN, PEER = "ab" * 32, "cd" * 32


@dataclass(frozen=True)
class Refused:
    """A command line in which the option does nothing, and what is said; {names} are of the fixture `there`."""

    line: str
    words: str


@dataclass(frozen=True)
class Named(Refused):
    """The same, where the command goes on and a line on standard error names the option."""


@dataclass(frozen=True)
class Shown:
    """A test that shows it, as it takes a run to do so."""

    file: str
    test: str


Rows = dict[str, tuple[Refused | Shown, ...]]
ALWAYS: tuple[Refused, ...] = ()

TRAIN = "cli/run/test_train.py"
SETTINGS = "cli/test_settings.py"
LEAVE = "cli/compose/test_leave.py"


def here(line: str) -> Rows:
    """Return the rows of the options that say how others reach this machine, of the verb with which `line` begins."""
    idle = "tls is not among the transports"
    return {
        "--name": ALWAYS,
        "--key": ALWAYS,
        "--lan": ALWAYS,
        "--host": (Refused(f"{line} --transports iroh --host 127.0.0.1", idle),),
        "--port": (Refused(f"{line} --transports iroh --port 5", idle),),
        "--transports": ALWAYS,
        "--up": ALWAYS,
        "--down": ALWAYS,
        "--per-day": ALWAYS,
        "--machine": (Shown(SETTINGS, "test_a_field_without_effect_is_named"),),
    }


def hardware(line: str) -> Rows:
    no_gpu = Refused(f"{line} --device cpu --vram 1GB", "device is cpu, which has no memory of its own")
    always = ("--device", "--threads", "--memory", "--cores", "--hours", "--code")
    check = Shown("launch/test_corpus.py", "test_where_nobody_is_audited_a_check_has_no_effect")
    return {**dict.fromkeys(always, ALWAYS), "--vram": (no_gpu,), "--check": (check,)}


def asked(line: str) -> Rows:
    """Return the rows of the options that say what a stack is."""
    always = ("--how", "--handover", "--cut-last", "--cut-first", "--growth", "--steps", "--batch-size", "--seq-len")
    return {
        **dict.fromkeys(always, ALWAYS),
        "--scale": (Refused(f"{line} --scale 2", "only --handover scaled has a scale"),),
        "--exits": (Refused(f"{line} --exits all", "only --how joint trains by exits"),),
        "--eta": (Refused(f"{line} --eta 2", "only --how sauce goes in rounds"),),
        "--per-round": (Refused(f"{line} --per-round 2", "only --how sauce goes in rounds"),),
    }


STAY: Rows = dict.fromkeys(("--until", "--quiet", "--parent"), ALWAYS)
ENDS: Rows = dict.fromkeys(("--report", "--log"), ALWAYS)
LOGS = "logs are read from this machine's disk"
OF_LOGS: Rows = {"--transports": (Refused("{verb} {log} --transports tls", LOGS),)}
LIES_HERE = "need no network"
SCENARIO = "is a scenario, and its kinds say which machines"
HERE = "--serve times this machine, and tells no cost"
TRAINED = "the model was trained"
WHOLE = "a run without stages is answered for once it is trained"
PIECE = "the model is in one piece"
MONEY = "energy and money are not planned for runs with stages"
FAST = "--tokens-per-s 1000"


def where(line: str) -> Rows:
    return {
        "--ticket": ALWAYS,
        "--run": (Refused(f"{line} --ticket {{ticket}} --run abcd", "the ticket says which run it is"),),
        "--transports": ALWAYS,
    }


def acting(line: str) -> Rows:
    return {**dict.fromkeys(("--key", "--reason", "--wait-s"), ALWAYS), **where(f"{line} --key {{key}}")}


TABLE: dict[str, Rows] = {
    "": {"--home": (Named("--home {tmp}/other methods", "--home"),), "--version": ALWAYS},
    "demo": {
        "--peers": (Refused("demo {demo} --peers 2", "already holds a demo"),),
        "--minutes": (
            Refused("demo {demo} --minutes 2", "already holds a demo"),
            Refused("demo {tmp}/new --minutes 2 --tokens 5", "exclude each other"),
        ),
        "--tokens": (
            Refused("demo {demo} --tokens 2", "already holds a demo"),
            Refused("demo {tmp}/new --tokens 2 --minutes 2", "exclude each other"),
        ),
        "--fresh": ALWAYS,
        "--quiet": ALWAYS,
    },
    "train": {
        "--set": (
            Refused("train {run} --set stages=2 --set train.sample_every=5", "--set train.sample_every has no effect"),
            Refused("train {run} --set method={{type='dpsgd',degree=3}}", "--set method.degree has no effect"),
        ),
        "--go-on": (
            Refused("train {run} --go-on", "nothing to go on with"),
            Shown(TRAIN, "test_more_text_is_another_run_and_is_told_how"),
        ),
        "--new": (
            Refused("train {run} --new --go-on", "exclude each other"),
            Shown(TRAIN, "test_a_run_that_is_just_this_one_is_not_begun_anew"),
        ),
        "--after": (
            Refused("train {run} --after last --go-on", "exclude each other"),
            Shown(TRAIN, "test_what_cannot_begin_another_is_refused_and_leaves_nothing"),
        ),
        **{
            option: (Refused(f"train {{run}} {option} {value}".rstrip(), f"{option}: no effect on"),)
            for option, value in {
                **{"--run-name": "mine", "--size": "nano", "--length": "2h", "--peers": "2", "--yes": ""}
            }.items()
        },
        "--model": (
            Refused("train {run} --model {tmp}", "--model: no effect on"),
            Shown("cli/own/test_own_chats.py", "test_what_makes_no_sense_is_refused_and_leaves_nothing"),
        ),
        "--wait-for": (Shown(TRAIN, "test_a_run_that_has_begun_waits_for_nobody_and_says_so"),),
        **here("train {run}"),
        "--key": (Shown(TRAIN, "test_a_run_is_not_begun_anew_by_another_key_unasked"),),
        **hardware("train {run}"),
        **STAY,
        **ENDS,
    },
    "join": {
        "--yes": ALWAYS,
        "--data": (Shown("library/test_train.py", "test_two_train_together_by_a_ticket"),),
        "--model": (Shown("peer/test_tuning.py", "test_a_run_from_a_seed_takes_no_folder"),),
        "--blocking": ALWAYS,
        "--draw-only": (Shown("training/test_rewarded.py", "test_drawing_only_needs_a_run_with_rewards"),),
        **here("join {ticket}"),
        **hardware("join {ticket}"),
        **STAY,
        **ENDS,
    },
    "anchor": {
        "--keep": (Shown("launch/test_anchor.py", "test_of_a_run_that_is_not_audited_nothing_more_is_kept"),),
        **here("anchor {ticket}"),
        **STAY,
    },
    "status": {"--follow": ALWAYS, "--json": ALWAYS, **OF_LOGS},
    "watch": {**dict.fromkeys(("--public", "--host", "--port"), ALWAYS), **OF_LOGS},
    "report": {"--out": ALWAYS, **OF_LOGS},
    "compare": {"--out": ALWAYS},
    "ticket": {},
    "runs": {"--json": ALWAYS},
    "runs delete": {"--yes": ALWAYS},
    "pause": {"--all": (Shown("cli/run/test_pause.py", "test_all_beside_one_that_is_named_is_refused"),)},
    "resume": {"--all": (Shown("cli/run/test_pause.py", "test_all_beside_one_that_is_named_is_refused"),)},
    "gather": {
        "--into": ALWAYS,
        **here("gather {ticket}"),
        **{
            option: (*here("gather {ticket}")[option], Refused(f"gather last {option} {value}", LIES_HERE))
            for option, value in {
                **{"--name": "me", "--key": "{key}", "--host": "::1", "--port": "5", "--transports": "tls"},
                **{"--up": "1gbit", "--down": "1gbit", "--per-day": "1GB", "--machine": "{machine}"},
            }.items()
        },
    },
    "generate": {
        "--max-tokens": ALWAYS,
        "--temperature": (
            Refused("generate last --top-k 1 --temperature 0.5", "--top-k 1 always takes the likeliest token"),
        ),
        "--top-k": (
            Refused("generate last --temperature 0 --top-k 5", "--temperature 0 always takes the likeliest token"),
        ),
        "--top-p": (
            Refused("generate last --temperature 0 --top-p 0.5", "--temperature 0 always takes"),
            Refused("generate last --top-k 1 --top-p 0.5", "--top-k 1 always takes"),
        ),
        "--seed": (
            Refused("generate last --temperature 0 --seed 0", "--temperature 0 always takes"),
            Refused("generate last --top-k 1 --seed 1", "--top-k 1 always takes"),
        ),
        "--device": ALWAYS,
    },
    "serve": {
        **dict.fromkeys(("--host", "--port", "--keys", "--name"), ALWAYS),
        **{
            option: (
                Refused(f"serve --backend vllm {option} {value}", "the server of --backend computes"),
                Refused(f"serve {{ticket}} {option} {value}", "the run's members compute"),
            )
            for option, value in {
                **{"--device": "cpu", "--threads": "1", "--numbers": "fp32", "--cache": "1GB"}
            }.items()
        },
        "--draft": (
            Refused("serve --backend vllm --draft last", "the server of --backend computes"),
            Refused("serve {ticket} --draft last", "the run's members compute"),
            Refused("serve last last --draft last", "it guesses for one model, and here are several"),
        ),
        "--max-context": (Refused("serve --backend vllm --max-context 9", "the server of --backend computes"),),
        **{
            option: (
                Refused(f"serve --backend vllm {option} {value}", "the server of --backend computes"),
                Refused(f"serve last {option} {value}", "this machine computes, and asks nobody"),
            )
            for option, value in {"--transports": "tls", "--machine": "{machine}"}.items()
        },
        "--backend": ALWAYS,
        "--backend-key": (Refused("serve last --backend-key {machine}", "it is of --backend"),),
        "--route-every": (
            Refused("serve --backend vllm --route-every 9", "the server of --backend computes"),
            Refused("serve {ticket} --route-every 9", "the run's members compute"),
            Refused("serve last --route-every 9", "no paths"),
        ),
    },
    "serve key add": {
        "--keys": ALWAYS,
        **dict.fromkeys(("--requests-per-minute", "--tokens-per-minute", "--tokens-per-day", "--concurrent"), ALWAYS),
        **dict.fromkeys(("--model", "--priority", "--expires"), ALWAYS),
    },
    "serve key list": {"--keys": ALWAYS},
    "serve key remove": {"--keys": ALWAYS},
    "chat": dict.fromkeys(("--model", "--key-file", "--system", "--temperature", "--max-tokens"), ALWAYS),
    "eval": {
        "--device": ALWAYS,
        "--tasks": ALWAYS,
        **{
            option: (Refused(f"eval last --tasks x.jsonl {option} {value}", "asks questions, and measures no loss"),)
            for option, value in {"--data": "x.txt", "--windows": "3"}.items()
        },
        **{
            option: (Refused(f"eval last {option} {value}".rstrip(), "there are no --tasks"),)
            for option, value in {"--before": "", "--plain": "", "--max-tokens": "9", "--answers": "x.jsonl"}.items()
        },
    },
    "export": {
        "--dtype": ALWAYS,
        "--gguf": ALWAYS,
        "--adapter": (Refused("export last out --adapter --gguf", "Leave out --gguf"),),
    },
    "compose member": {"--name": ALWAYS, "--to": ALWAYS},
    "compose list": {"--json": ALWAYS},
    "compose plan": asked("compose plan a b"),
    "compose align": {
        **dict.fromkeys(("--data", "--name", "--lr", "--seed", "--device"), ALWAYS),
        **asked("compose align a b --data x --name c"),
    },
    "compose loop": dict.fromkeys(
        (
            "--data",
            "--name",
            "--kind",
            "--entropy",
            "--steps",
            "--lr",
            "--batch-size",
            "--seq-len",
            "--seed",
            "--device",
        ),
        ALWAYS,
    ),
    "compose select": dict.fromkeys(("--data", "--depth", "--beam", "--seq-len", "--device", "--json"), ALWAYS),
    "compose split": {
        **dict.fromkeys(("--data", "--clusters", "--heldout"), ALWAYS),
        "--num": (Refused("compose split f --data x --clusters y --num 3", "--clusters says how many"),),
        "--seed": (Refused("compose split f --data x --clusters y --seed 3", "--clusters says how many"),),
    },
    "compose think": dict.fromkeys(
        ("--data", "--name", "--latents", "--stages", "--epochs", "--lr", "--batch-size", "--seed", "--device"), ALWAYS
    ),
    "compose denoise": dict.fromkeys(
        ("--data", "--name", "--masks", "--steps", "--lr", "--batch-size", "--seq-len", "--seed", "--device"), ALWAYS
    ),
    "compose below": dict.fromkeys(("--data", "--samples", "--places", "--seq-len", "--device", "--json"), ALWAYS),
    "compose block": dict.fromkeys(
        (
            *("--of", "--data", "--name", "--low", "--high", "--steps", "--lr", "--batch-size", "--seq-len", "--seed"),
            "--device",
        ),
        ALWAYS,
    ),
    "compose blocks": dict.fromkeys(
        ("--data", "--draws", "--samples", "--monolith", "--seq-len", "--seed", "--device", "--json"), ALWAYS
    ),
    "compose mix": {
        **dict.fromkeys(("--data", "--name", "--how", "--seq-len", "--device"), ALWAYS),
        "--top": (Refused("compose mix a b --data x --name c --how soup --top 1", "a soup is one model"),),
        "--clusters": (Refused("compose mix a b --data x --name c --clusters y", "only --how distance"),),
    },
    "compose merge": dict.fromkeys(
        ("--data", "--name", "--top", "--thaw", "--steps", "--lr", "--batch-size", "--seq-len", "--seed", "--device"),
        ALWAYS,
    ),
    "compose leave": {
        "--name": ALWAYS,
        **dict.fromkeys(
            ("--data", "--lr", "--seed", "--device"),
            (Shown(LEAVE, "test_who_was_not_the_best_takes_no_control_along"),),
        ),
    },
    "compose route": dict.fromkeys(
        (
            "--data",
            "--levels",
            "--ends",
            "--how",
            "--overlap",
            "--rounds",
            "--more-rounds",
            "--steps",
            "--batch-size",
            "--seq-len",
            "--lr",
            "--heldout",
            "--router-share",
            "--seed",
            "--device",
        ),
        ALWAYS,
    ),
    "compose path": dict.fromkeys(("--tickets", "--keep", "--device", "--transports", "--machine"), ALWAYS),
    "compose reshard": dict.fromkeys(("--rounds", "--device"), ALWAYS),
    "compose reroute": dict.fromkeys(("--every", "--device"), ALWAYS),
    "compose evaluate": {
        **dict.fromkeys(("--data", "--monolith", "--no-monolith", "--windows", "--device", "--json"), ALWAYS),
        "--route-every": (Refused("compose evaluate x --data x.txt --no-monolith --route-every 9", "it is of paths"),),
    },
    "compose export": {},
    "compose remove": {},
    "compose space": {},
    "inspect": {
        "--model": (Refused("inspect last --model last", "no such file or folder"),),
        "--number": (Refused("inspect last --number 2", "it is of conversations"),),
    },
    "doctor": {"--machine": ALWAYS, "--port": ALWAYS, "--json": ALWAYS},
    "plan": {
        "--peers": (Refused("plan {scenario} --peers 4", SCENARIO), Refused("plan {run} --serve --peers 4", WHOLE)),
        "--device": (
            Refused("plan {scenario} --device rtx4090", SCENARIO),
            Refused("plan {run} --serve --device rtx4090", HERE),
        ),
        "--tokens-per-s": (
            Refused("plan {scenario} --tokens-per-s 5", SCENARIO),
            Refused("plan {run} --serve --tokens-per-s 5", WHOLE),
        ),
        "--efficiency": (
            Refused("plan {scenario} --efficiency 0.5", SCENARIO),
            Refused(f"plan {{run}} {FAST} --efficiency 0.5", "--tokens-per-s says how fast each trains"),
            Refused("plan {run} --device here --efficiency 0.5", "--device here times this machine"),
        ),
        "--line": (Refused("plan {scenario} --line home", SCENARIO), Refused("plan {run} --serve --line home", PIECE)),
        "--up": (Refused("plan {scenario} --up 5mbit", SCENARIO), Refused("plan {run} --serve --up 5mbit", PIECE)),
        "--down": (
            Refused("plan {scenario} --down 5mbit", SCENARIO),
            Refused("plan {run} --serve --down 5mbit", PIECE),
        ),
        "--delay": (Refused("plan {scenario} --delay 5ms", SCENARIO), Refused("plan {run} --serve --delay 5ms", PIECE)),
        "--method": (Refused("plan last --serve --method ddp", TRAINED),),
        "--every": (
            Refused(f"plan {{run}} {FAST} --set method.type=auto --every 5", "auto chooses both as it goes"),
            Refused(f"plan {{run}} {FAST} --method ddp --every 5", "synchronises after each step"),
        ),
        "--codec": (Refused(f"plan {{run}} {FAST} --set method.type=auto --codec int8", "auto chooses both"),),
        "--price-per-kwh": (Refused(f"plan {{staged}} {FAST} --price-per-kwh 1", MONEY),),
        "--price-per-hour": (
            Refused(f"plan {{staged}} {FAST} --price-per-hour 1", MONEY),
            Refused("plan {scenario} --price-per-hour 1", SCENARIO),
        ),
        "--watts": (Refused(f"plan {{staged}} {FAST} --watts 1", MONEY),),
        "--details": (
            Refused(f"plan {{staged}} {FAST} --details", "a run with stages is told whole"),
            Refused(f"plan {{run}} {FAST} --json --details", "--json prints everything"),
        ),
        "--cluster": (Refused(f"plan {{staged}} {FAST} --cluster h100-sxm", MONEY),),
        "--cluster-size": (Refused(f"plan {{staged}} {FAST} --cluster-size 1", MONEY),),
        "--cluster-price": (Refused(f"plan {{staged}} {FAST} --cluster-price 1", MONEY),),
        "--set": (
            Refused(f"plan {{run}} {FAST} --method ddp --set method.codec.type=fp32", "--method takes its place"),
            Refused(f"plan {{run}} {FAST} --every 5 --set method.every=4", "--every takes its place"),
            Refused(f"plan {{run}} {FAST} --codec int4 --set method.reply_codec.type=int8", "--codec takes its place"),
            Refused(f"plan {{run}} {FAST} --peers 3 --set peers=4", "--peers takes its place"),
            Refused(f"plan {{staged}} {FAST} --set has_even_leases=true", "--set has_even_leases has no effect"),
            Refused("plan last --serve --set seed=3", TRAINED),
            *(
                Refused(f"plan {{run}} --serve --set {change}", f"--set {field} has no effect: {WHOLE}")
                for change, field in (
                    *(("peers=3", "peers"), ("method.type=ddp", "method.type"), ("train.tokens=99", "train.tokens")),
                    *(("train.batch_size=2", "train.batch_size"), ("train.schedule.lr=1", "train.schedule.lr")),
                )
            ),
        ),
        "--serve": (Refused("plan {scenario} --serve", "does not answer"),),
        "--numbers": (
            Refused(f"plan {{run}} {FAST} --numbers int8", "--serve is not given"),
            Refused("plan {staged} --serve --numbers int8", "members of stages choose them"),
        ),
        "--stages": (
            Refused(f"plan {{run}} {FAST} --stages 2", "--serve is not given"),
            Refused("plan {run} --serve --stages 2", "a run file says it"),
        ),
        "--share": (
            Refused(f"plan {{run}} {FAST} --share 0.2", "--serve is not given"),
            Refused("plan {run} --serve --share 0.2", WHOLE),
            Refused("plan last --serve --share 0.2", TRAINED),
        ),
        "--json": ALWAYS,
    },
    "methods": {},
    "simulate": {
        "--events": ALWAYS,
        "--json": ALWAYS,
        "--set": (Refused("simulate {scenario} --set method={{type='choco',degree=3}}", "--set method.degree has no"),),
    },
    "act show": where("act show"),
    "act remove": acting("act remove {peer}"),
    "act ban": acting("act ban {peer}"),
    "act pardon": acting("act pardon {peer}"),
    "act amend": {
        "--set": (Shown("cli/run/test_act.py", "test_what_was_mistyped_is_2_and_named"),),
        **acting("act amend --set train.tokens=5"),
    },
    "act succeed": {
        "--at-once": ALWAYS,
        "--without-ticket": (
            Refused("act succeed {peer} --key {key} --ticket {ticket} --without-ticket", "is given by its name"),
        ),
        **acting("act succeed {peer}"),
    },
    "act rewind": acting("act rewind 3"),
    "act vote-rewind": {
        **dict.fromkeys(("--key", "--connect-with", "--reason", "--wait-s"), ALWAYS),
        **where("act vote-rewind 3"),
    },
    "act vote-out": {
        **dict.fromkeys(("--key", "--connect-with", "--reason", "--wait-s"), ALWAYS),
        **where("act vote-out {peer}"),
    },
    "bench methods": {
        "--out": ALWAYS,
        "--jobs": (Refused("bench methods {plan} --report --jobs 2", "--report plays nothing"),),
        "--only": (Refused("bench methods {plan} --report --only ddp", "--report plays nothing"),),
        "--set": tuple(
            Refused(f"bench methods {{plan}} --no-plot --out {{tmp}}/bench --set {change}", f"--set {field} has no")
            for change, field in (
                *(("method.type=ddp", "method.type"), ("seed=3", "seed"), ("peers=3", "peers")),
                *(("train.tokens=3", "train.tokens"), ("method={{type='ddp'}}", "method.type")),
            )
        ),
        "--report": ALWAYS,
        "--no-plot": ALWAYS,
    },
    "keys new": {},
    "keys show": {},
    "keys list": {},
    "keys backup": {
        "--passphrase-file": (
            Refused("keys backup {key} {tmp}/kept --plain --passphrase-file {machine}", "--plain encrypts nothing"),
        ),
        "--plain": ALWAYS,
    },
    "keys restore": {
        "--passphrase-file": (
            Refused("keys restore {key} {tmp}/back --plain --passphrase-file {machine}", "that has no passphrase"),
            Refused("keys restore {key} {tmp}/back --passphrase-file {machine}", "it needs no passphrase"),
        ),
        "--plain": (Shown("cli/test_verbs.py", "test_keys_are_made_shown_listed_backed_up_and_restored"),),
    },
    "tokenizer train": dict.fromkeys(("--vocab-size", "--data"), ALWAYS),
    "tokenizer show": {},
    "ledger show": {
        "--last": (Shown("cli/watch/test_ledger.py", "test_one_round_is_shown_with_all_that_it_counts"),),
        **dict.fromkeys(("--round", "--stage", "--json"), ALWAYS),
    },
    "ledger stats": dict.fromkeys(("--stage", "--json"), ALWAYS),
    "ledger prove": dict.fromkeys(("--round", "--out", "--peer", "--stage"), ALWAYS),
    "ledger evidence": dict.fromkeys(("--round", "--out", "--stage"), ALWAYS),
    "ledger check": {
        "--founder": ALWAYS,
        "--accept-few": (Refused("ledger check last --all --accept-few", "by a majority's votes alone"),),
        "--segments": (Refused("ledger check last --all --segments 5", "nothing is drawn"),),
        "--all": ALWAYS,
        "--device": (Refused("ledger check {log} --device cpu", "checked without torch"),),
        "--threads": (Refused("ledger check {log} --threads 1", "checked without torch"),),
        "--json": ALWAYS,
    },
    "patch make": {},
    "patch apply": {},
}


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}".strip())


def parsed() -> dict[str, set[str]]:
    """Return the options of each verb, as the parser has them."""
    found = {}
    for path, command in commands(typer.main.get_command(make_app(Place()))):
        options = {max(each.opts, key=len) for each in command.params if each.param_type_name == "option"}
        options -= {"--help", "--install-completion", "--show-completion"}
        if options or not hasattr(command, "commands"):
            found[path] = options
    return found


def test_every_option_of_every_verb_has_a_row() -> None:
    rows = {verb: set(options) for verb, options in TABLE.items()}
    assert parsed() == rows


def test_tests_that_are_named_are_there() -> None:
    named = [each for rows in TABLE.values() for row in rows.values() for each in row if isinstance(each, Shown)]
    missing = [each for each in named if f"def {each.test}(" not in (UNIT / each.file).read_text()]
    assert missing == []


@pytest.fixture
def there(tmp_path: Path, run_path: Path, home: Path) -> dict[str, Path | str]:
    """Return what command lines name."""
    scenario, plan, machine, staged = (tmp_path / name for name in ("s.toml", "plan.toml", "m.toml", "staged.toml"))
    kind = '\n[[kind]]\nname = "lab"\ncount = 3\ntokens_per_s = 1000.0\nup_mbit = 10.0\n'
    scenario.write_text(f'run = "run.toml"\n{kind}')
    plan.write_text(f'run = "run.toml"\nsteps = [2]\n{kind}\n[[row]]\nname = "ddp"\nmethod = {{ type = "ddp" }}\n')
    machine.write_text("threads = 1\n")
    text = run_path.read_text().replace("num_layers = 1", "num_layers = 2\nis_tied = false").replace("peers = 1", "")
    staged.write_text("stages = 2\n" + text)
    log = tmp_path / "log.jsonl"
    log.touch()
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "demo.toml").touch()
    section = home / "runs" / RUN / PEER / "stage-1" / "checkpoint" / "checkpoint.json"
    section.parent.mkdir(parents=True)
    section.write_text("{}")
    with open_identity(tmp_path / "some.pem", create=True):
        pass
    paths = {"tmp": tmp_path, "run": run_path, "scenario": scenario, "plan": plan, "machine": machine, "log": log}
    paths |= {"demo": tmp_path / "demo", "key": tmp_path / "some.pem", "staged": staged}
    return {**paths, "ticket": a_ticket(), "peer": PEER}


CASES = [
    (verb, option, case)
    for verb, rows in TABLE.items()
    for option, row in rows.items()
    for case in row
    if isinstance(case, Refused)
]


@pytest.mark.parametrize(("verb", "option", "case"), CASES, ids=[f"{verb} {option}" for verb, option, _ in CASES])
def test_an_option_that_does_nothing_is_refused_or_named(
    verb: str, option: str, case: Refused, weft: Weft, there: dict[str, Path | str]
) -> None:
    line = case.line.format(verb=verb, **there)
    answer = weft(*line.split())
    said = " ".join(answer.err.split())
    assert option in line
    assert case.words in said, answer
    if isinstance(case, Named):
        assert answer.code == 0
        assert answer.err.count("\n") == 1
    else:
        assert answer.code != 0
        assert answer.out == ""
        assert said.startswith("weft: ")
        assert answer.err.count("\n") == 1, answer.err
