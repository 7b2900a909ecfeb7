"""`weft ledger`: what it says of rounds on disk, and of files that show what was counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from unit.cli.small import Weft
from unit.cli.test_bad_input import refused
from unit.store.test_rounds import KEYS, MEMBERS, RUN, chain, kept
from unit.verify.evidence.forge import ME as LIAR
from unit.verify.evidence.test_evidence import step
from weft.ids import Round, short
from weft.store.rounds import RoundsFile
from weft.sync.records.acts import Finding, Warrant
from weft.sync.records.messages import Accept, HeldWork, RoundNote
from weft.sync.records.proof import WorkProof
from weft.wire import decode, encode, seal

ME = MEMBERS[1]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    kept(folder / "runs" / RUN / ME / "rounds.db", chain(7, MEMBERS))
    return folder


def test_the_newest_rounds_are_shown(weft: Weft, home: Path) -> None:
    answer = weft("--home", home, "ledger", "show", RUN[:8], "--last", 2)
    assert answer.code == 0, answer.err
    first, second = answer.out.splitlines()
    assert first.split() == ["round", "5", "3", "peers", "counted,", "15", "tokens", "(members:", "3)"]
    assert second.split()[:2] == ["round", "6"]
    assert "2 of 7 rounds" in answer.err
    (opening,) = weft("--home", home, "ledger", "show", RUN[:8], "--round", 0).out.splitlines()[:1]
    assert "the run begins" in opening


def test_one_round_is_shown_with_all_that_it_counts(weft: Weft, home: Path) -> None:
    lines = weft("--home", home, "ledger", "show", RUN[:8], "--round", 3).out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  counted")] == list(MEMBERS)
    found = json.loads(weft("--home", home, "ledger", "show", RUN[:8], "--round", 3, "--json").out)["rounds"]
    assert [each["round"] for each in found] == [3]
    assert [each["tokens"] for each in found[0]["counted"]] == [3, 3, 3]
    assert len(found[0]["work"]) == 64
    refused(weft, 11, "not here", "--home", home, "ledger", "show", RUN[:8], "--round", 99)
    refused(weft, 2, "no effect", "--home", home, "ledger", "show", RUN[:8], "--round", 3, "--last", 2)


def test_what_a_round_decided_is_shown(weft: Weft, home: Path) -> None:
    path = home / "runs" / RUN / ME / "rounds.db"
    manifest = RoundsFile(path).manifest(6)
    assert manifest is not None
    liar, *others = MEMBERS
    found = Finding(run=RUN, peer=liar, round=Round(5), work="ab" * 32, before=0, outcome="differs", why="no such step")
    warrant = Warrant(letters=tuple(seal(KEYS[peer], found) for peer in others))
    counted = tuple(replace(each, work="cd" * 32) for each in manifest.contributions)
    RoundsFile(path).put(replace(manifest, acts=(warrant,), contributions=counted, left=(liar,)), None)
    lines = weft("--home", home, "ledger", "show", RUN[:8], "--round", 6).out.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("  counted")] == 3 * [["work", "cdcdcdcd"]]
    by = ", ".join(map(short, others))
    assert lines[-1] == f"  decided   strike out {liar}, by {by}: no such step"
    (shown,) = json.loads(weft("--home", home, "ledger", "show", RUN[:8], "--round", 6, "--json").out)["rounds"]
    assert shown["decided"] == [{"kind": "strike out", "subject": liar, "by": others, "reason": "no such step"}]
    assert {each["work"] for each in shown["counted"]} == {"cd" * 32}


def test_what_waits_of_newcomers_and_what_was_cleared_is_shown(weft: Weft, home: Path) -> None:
    path = home / "runs" / RUN / ME / "rounds.db"
    manifest = RoundsFile(path).manifest(6)
    assert manifest is not None
    new, *others = MEMBERS
    found = Finding(run=RUN, peer=new, round=Round(5), work="ab" * 32, before=0, outcome="equal")
    warrant = Warrant(letters=tuple(seal(KEYS[peer], found) for peer in others))
    RoundsFile(path).put(replace(manifest, acts=(warrant,), held=(HeldWork(peer=new, work="cd" * 32),)), None)
    lines = weft("--home", home, "ledger", "show", RUN[:8], "--round", 6).out.splitlines()
    by = ", ".join(map(short, others))
    assert lines[-2:] == [f"  waits     {new}  work cdcdcdcd", f"  cleared   {new}  work abababab, by {by}"]
    (shown,) = json.loads(weft("--home", home, "ledger", "show", RUN[:8], "--round", 6, "--json").out)["rounds"]
    assert shown["waits"] == [{"peer": new, "work": "cd" * 32}]
    assert shown["cleared"] == [{"peer": new, "work": "ab" * 32, "by": others}]
    assert shown["decided"] == []


def test_what_was_counted_of_each_is_added_up(weft: Weft, home: Path) -> None:
    lines = weft("--home", home, "ledger", "stats", RUN[:8]).out.splitlines()
    assert [line.split() for line in lines] == [[peer, "21", "tokens", "6", "rounds"] for peer in MEMBERS]
    found = json.loads(weft("--home", home, "ledger", "stats", RUN[:8], "--json").out)
    assert found["peers"] == {peer: {"tokens": 21, "rounds": 6} for peer in MEMBERS}


def test_a_proof_is_written_and_checked_elsewhere(weft: Weft, home: Path, tmp_path: Path) -> None:
    proof = tmp_path / "my.proof"
    made = weft("--home", home, "ledger", "prove", RUN[:8], "--round", 2, "-o", proof)
    assert made.code == 0, made.err
    found = json.loads(weft("--home", tmp_path / "no", "ledger", "check", proof, "--json").out)
    assert (found["run"], found["round"], found["tokens"]) == (RUN, 2, {ME: 2})
    said = weft("ledger", "check", proof, "--founder", found["founder"][:16])
    assert said.code == 0
    assert f"counted {ME}: 2 tokens" in said.out
    assert found["founder"] in said.out
    refused(weft, 11, "began", "ledger", "check", proof, "--founder", "00" * 8)
    refused(weft, 2, "no key", "ledger", "check", proof, "--founder", "0")
    refused(weft, 2, "there already", "--home", home, "ledger", "prove", RUN[:8], "--round", 2, "-o", proof)


def test_a_proof_may_be_of_another(weft: Weft, home: Path, tmp_path: Path) -> None:
    proof = tmp_path / "other.proof"
    weft("--home", home, "ledger", "prove", RUN[:8], "--round", 2, "--peer", MEMBERS[2][:10], "-o", proof)
    assert json.loads(weft("ledger", "check", proof, "--json").out)["brought_by"] == MEMBERS[2]
    stranger = min(KEYS.keys() - set(MEMBERS))
    words = ("--home", home, "ledger", "prove", RUN[:8], "--round", 2, "-o", tmp_path / "no.proof")
    assert short(MEMBERS[0]) in refused(weft, 2, "counts", *words, "--peer", stranger)
    assert not (tmp_path / "no.proof").exists()


def test_what_shows_nothing_is_refused(weft: Weft, home: Path, tmp_path: Path) -> None:
    proof = tmp_path / "my.proof"
    weft("--home", home, "ledger", "prove", RUN[:8], "--round", 2, "-o", proof)
    true = decode(proof.read_bytes(), WorkProof)
    proof.write_bytes(encode(replace(true, counted=replace(true.counted, tokens=999))))
    refused(weft, 11, "does not count this work", "ledger", "check", proof)
    proof.write_bytes(b"no proof")
    refused(weft, 11, "no file that", "ledger", "check", proof)
    refused(weft, 2, "cannot be read", "ledger", "check", tmp_path / "nowhere")


def test_evidence_is_written_and_checked_elsewhere(weft: Weft, home: Path, tmp_path: Path) -> None:
    path, proof, out = home / "runs" / RUN / ME / "rounds.db", step(), tmp_path / "lie.evidence"
    manifest = RoundsFile(path).manifest(6)
    assert manifest is not None
    words = ("--home", home, "ledger", "evidence", RUN[:8], "--round", 6, "-o", out)
    refused(weft, 11, "struck nobody out by evidence", *words)
    RoundsFile(path).put(replace(manifest, acts=(proof,)), None)
    lines = weft("--home", home, "ledger", "show", RUN[:8], "--round", 6).out.splitlines()
    assert lines[-2].startswith(f"  decided   strike out {LIAR.peer}: its optimizer did not make")
    assert lines[-1] == f"  evidence  {proof.nbytes:,} bytes: weft ledger evidence {RUN[:8]} --round 6 -o FILE"
    made = weft(*words)
    assert (made.code, decode(out.read_bytes(), Warrant)) == (0, proof)
    refused(weft, 2, "there already", *words)
    said = weft("--home", tmp_path / "no", "ledger", "check", out)
    assert f"  lied      {LIAR.peer}: its optimizer did not make this training step" in said.out.splitlines()
    found = json.loads(weft("ledger", "check", out, "--json").out)
    assert (found["peer"], found["round"], found["part"]) == (LIAR.peer, 4, None)
    refused(weft, 2, "no effect on evidence", "ledger", "check", out, "--founder", "00" * 8)
    assert isinstance(proof.shown, bytes)
    out.write_bytes(encode(replace(proof, shown=proof.shown[:-1] + b"x")))
    refused(weft, 11, "proves nothing", "ledger", "check", out)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from weft.cli.main import main
main()
"""


@pytest.mark.full
def test_proofs_and_evidence_are_checked_where_there_is_no_torch(weft: Weft, home: Path, tmp_path: Path) -> None:
    proof, lie = tmp_path / "work.proof", tmp_path / "lie.evidence"
    assert weft("--home", home, "ledger", "prove", RUN[:8], "--round", 2, "-o", proof).code == 0
    lie.write_bytes(encode(step()))
    for file, said in ((proof, short(ME)), (lie, short(LIAR.peer))):
        command = [sys.executable, "-P", "-c", WITHOUT_TORCH, "ledger", "check", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_two_notes_of_one_member_are_evidence_too(weft: Weft, home: Path, tmp_path: Path) -> None:
    path, out = home / "runs" / RUN / ME / "rounds.db", tmp_path / "lie.evidence"
    manifest = RoundsFile(path).manifest(6)
    assert manifest is not None
    notes = [RoundNote(branch=RUN, round=6, message=Accept(attempt=0, manifest=each * 32)) for each in ("ab", "cd")]
    RoundsFile(path).put(replace(manifest, acts=(Warrant(letters=tuple(seal(LIAR, each) for each in notes)),)), None)
    assert weft("--home", home, "ledger", "evidence", RUN[:8], "--round", 6, "-o", out).code == 0
    assert f"lied      {LIAR.peer}: it accepted two manifests" in weft("ledger", "check", out).out


def test_a_run_that_records_nothing_says_how_it_would(weft: Weft, home: Path) -> None:
    other = "ef" * 32
    (home / "runs" / other / ME).mkdir(parents=True)
    assert '[trust] type = "recorded"' in refused(
        weft, 11, "nothing is recorded", "--home", home, "ledger", "show", other[:8]
    )
