"""What a person reads at the end of a run."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec

from unit.cli.small import Kept
from weft.cli.model.generate import excerpt
from weft.cli.run.summary import Begun, summary, try_next
from weft.dashboard.view import About, Line, View
from weft.events import Evaluated, Preferred
from weft.ids import Digest, PeerId, Round, Tokens
from weft.peer.peer import Outcome
from weft.pipeline.config import PipelineConfig
from weft.run.staged import staged
from weft.store.home import CHECKPOINT_FILE
from weft.sync.method.presets import DdpConfig, spell_out
from weft.sync.method.schedule import CosineConfig

ME, ANNA, BERT = (PeerId(letter * 64) for letter in "cab")


def outcome_of(kept: Kept) -> Outcome:
    return Outcome(
        reason="complete",
        run=kept.run,
        peer=ME,
        round=Round(12),
        committed_tokens=Tokens(12_000),
        replica=Digest("d" * 64),
        loss=1.25,
        nats_per_byte=1.5,
        sample="x = 1\n",
        sent_nbytes=3_000_000,
        received_nbytes=1_000_000,
        checkpoint=Path("checkpoint"),
    )


def test_the_end_of_a_run_is_told_with_its_figures_and_what_to_try(kept: Kept) -> None:
    view = replace(View(), sent_nbytes=3_000_000, received_nbytes=1_000_000, ring_nbytes=400_000_000)
    text = summary(outcome_of(kept), view, "weft --home h")
    for words in (
        "run small: complete after 12,000 tokens, round 12",
        "held-out     1.5000 nats per byte (2.1640 bits)\n             loss on the text that was held out",
        "             1.2500 nats per token (perplexity 3.49), for this tokenizer only",
        "bytes        3 MB sent, 1 MB received since this start",
        "ring DDP, which exchanges gradients at every step: 400 MB, 100 times as much",
        "checkpoint   checkpoint",
        "\nit writes\n\n",
        "x = 1",
        f"weft --home h generate {kept.run.run[:8]}",
    ):
        assert words in text
    assert "the others" not in text  # there were none


def test_of_others_it_tells_the_round_and_leaves_their_digests_to_them(kept: Kept) -> None:
    lines = {
        ME: Line(name="me", state="stopped", round=12),
        BERT: Line(name="bert", state="left", round=11),
        ANNA: Line(name="anna", state="joined"),
    }
    text = summary(outcome_of(kept), replace(View(), peers=lines), "weft").splitlines()
    start = text.index(f"model        {'d' * 64}")
    assert [line.strip() for line in text[start + 1 : start + 4]] == [
        "digest of this peer's; all peers have the same after the same round",
        "anna: joined",
        "bert: left, last heard of at round 11",
    ]


def test_whoever_brought_a_complete_run_to_its_end_has_finished(kept: Kept) -> None:
    lines = {ANNA: Line(name="anna", state="finishing", round=11), BERT: Line(name="bert", state="left", round=3)}
    outcome, view = outcome_of(kept), replace(View(), peers=lines)
    text = summary(outcome, view, "weft")
    assert "anna: finished\n" in text
    assert "bert: left, last heard of at round 3\n" in text
    stopped = summary(replace(outcome, reason="stopped by Ctrl-C"), view, "weft")
    assert "anna: finishing, last heard of at round 11" in stopped
    hint = "tickets      that name only this machine"
    assert hint in stopped
    assert hint not in text
    lines = {ANNA: Line(name="anna", state="left", round=11), BERT: Line(name="bert", state="left", round=3)}
    assert hint not in summary(replace(outcome, reason="asked to"), replace(View(), peers=lines), "weft")


def test_the_heldout_loss_is_told_with_its_round_and_its_tokens(kept: Kept) -> None:
    made = Evaluated(round=Round(10), loss=1.25, nats_per_byte=1.5, num_tokens=65_536, committed_tokens=Tokens(9))
    text = summary(outcome_of(kept), replace(View(), evaluated=made), "weft")
    assert "at round 10, on 65,536 tokens; weft eval takes all held-out text" in text
    pairs = Preferred(accuracy=0.75, margin=0.5)
    view = replace(View(), run=About(loss_of="pair"), evaluated=msgspec.structs.replace(made, preferred=pairs))
    text = summary(replace(outcome_of(kept), loss=0.6, nats_per_byte=math.nan, preferred=pairs), view, "weft")
    assert "held-out     0.6000 nats per pair, 75.0 % of the pairs right, margin 0.5\n" in text
    assert "at round 10, on 65,536 pairs" in text


def test_a_run_that_made_worse_what_it_began_with_says_so_and_what_to_try(kept: Kept) -> None:
    def told(nats_per_byte: float, reason: str = "complete") -> str:
        before = Evaluated(
            round=Round(0), loss=1.2, nats_per_byte=nats_per_byte, num_tokens=65_536, committed_tokens=Tokens(0)
        )
        ended = replace(outcome_of(kept), reason=reason)
        return " ".join(summary(ended, View(), "weft", before=before).split())

    worse = told(1.4)  # it ends at 1.5
    assert "before the first round it was 1.4000 so the model is worse now. Try another run after the old one" in worse
    assert "with more text, or a lower rate: --set train.schedule.lr=0.0003" in worse
    assert "the model is worse so far" in told(1.4, "stopped by Ctrl-C")
    for no_worse in (told(1.5), told(1.6)):
        assert "worse" not in no_worse


def test_a_long_path_has_a_line_of_its_own_and_all_others_fit_the_terminal(kept: Kept) -> None:
    lines = {ANNA: Line(name="anna", state="left", round=11)}
    folder = Path("/home") / ("a" * 90)
    view = replace(View(), peers=lines, ring_nbytes=400_000_000)
    text = summary(replace(outcome_of(kept), checkpoint=folder), view, "weft").splitlines()
    assert text[text.index("checkpoint") + 1] == str(folder)
    assert [line for line in text if len(line) > 80] == [str(folder)]


def lines_after(text: str, line: str) -> list[str]:
    lines = text.splitlines()
    return [each.strip() for each in lines[lines.index(line) + 1 :]]


def test_who_stopped_reads_how_to_go_on_and_with_which_prompt_to_generate(kept: Kept, tmp_path: Path) -> None:
    train = msgspec.structs.replace(kept.run.train, sample_prompt="It was ")
    run = msgspec.structs.replace(kept.run, train=train)
    stopped = replace(outcome_of(kept), run=run, reason="stopped by Ctrl-C")
    text = summary(stopped, View(), "weft --home h")
    assert f'weft --home h generate {run.run[:8]} "It was "\n' in text
    assert lines_after(text, "to go on with the run") == [f"weft --home h train {run.run[:8]}"]
    own = summary(stopped, View(), "weft", Begun(key=tmp_path / "own.pem"))
    assert lines_after(own, "to go on with the run") == [f"weft train {run.run[:8]} --key {tmp_path / 'own.pem'}"]
    private = replace(stopped, run=msgspec.structs.replace(run, is_private=True))
    assert summary(private, View(), "weft").endswith("to go on with the run: the same command again")


def test_the_last_line_says_how_to_talk_to_what_was_trained() -> None:
    *_, last = try_next("weft --home h", "abc").splitlines()
    assert last == "  weft --home h serve abc  # to chat: http://127.0.0.1:8000/, or: weft chat"


def test_what_nobody_has_trained_is_not_offered_for_use(kept: Kept, tmp_path: Path) -> None:
    """Who stopped while it waited for others has random weights; with weights of elsewhere they are of use."""
    waited = replace(outcome_of(kept), reason="stopped by Ctrl-C", round=Round(0), committed_tokens=Tokens(0))
    unsaved = summary(waited, View(), "weft")
    assert unsaved.endswith("nothing was trained, and nothing is saved; to begin: the same command again")
    assert "checkpoint" not in unsaved
    write_text(tmp_path / "checkpoint" / CHECKPOINT_FILE)
    waited = replace(waited, checkpoint=tmp_path / "checkpoint")
    text = summary(waited, View(), "weft")
    assert "try next" not in text
    for verb in ("generate", "eval", "export", "serve"):
        assert f"weft {verb}" not in text
    assert lines_after(text, "to go on with the run") == [f"weft train {kept.run.run[:8]}"]
    learnt = replace(waited, run=msgspec.structs.replace(kept.run, is_seeded=False))
    assert "try next" in summary(learnt, View(), "weft")
    write_text(tmp_path / "stage-1" / "checkpoint" / CHECKPOINT_FILE)
    section = replace(cut(kept, tmp_path / "stage-1" / "checkpoint"), committed_tokens=Tokens(0))
    assert "gather" not in summary(section, View(), "weft")


def test_who_has_a_complete_run_reads_how_to_train_longer(kept: Kept) -> None:
    run, longer = kept.run.run[:8], "to train longer, or on more text"
    more = f"weft train MORE.txt --after {run}"
    of_text = summary(outcome_of(kept), View(), "weft", Begun(source="notes.txt", is_text=True))
    assert lines_after(of_text, longer) == ["weft train notes.txt --go-on --length 24ktokens", more]
    of_file = summary(outcome_of(kept), View(), "weft", Begun(source="first.toml"))
    assert lines_after(of_file, longer) == ["weft train first.toml --go-on   with train.tokens raised in it", more]
    falls = CosineConfig(total_tokens=kept.run.train.tokens)
    train = msgspec.structs.replace(kept.run.train, schedule=falls)
    fallen = replace(outcome_of(kept), run=msgspec.structs.replace(kept.run, train=train))
    (raised, _) = lines_after(summary(fallen, View(), "weft", Begun(source="first.toml")), longer)
    assert raised.endswith("with train.tokens and train.schedule.total_tokens raised in it")
    assert lines_after(summary(outcome_of(kept), View(), "weft"), longer) == [more]
    held = summary(outcome_of(kept), View(), "weft", Begun(source="notes.txt", is_text=True), 3)
    assert f"3 members hold run {run}, and none may change it alone" in held
    assert held.endswith(f"weft train notes.txt --after {run}")
    assert "--go-on" not in held


def cut(kept: Kept, checkpoint: Path) -> Outcome:
    """Return how a peer of a run with stages ended."""
    model = msgspec.structs.replace(kept.run.model, num_layers=5, is_tied=False)
    whole = msgspec.structs.replace(kept.run, model=model, method=spell_out(DdpConfig(), 2), has_even_leases=True)
    run = staged(whole, (Digest("1" * 64), Digest("2" * 64)), PipelineConfig())
    return replace(outcome_of(kept), run=run, checkpoint=checkpoint, loss=None, nats_per_byte=None, sample=None)


def test_of_a_section_nothing_is_suggested_that_takes_a_whole_model(kept: Kept) -> None:
    ended = cut(kept, Path("run") / "stage-1" / "checkpoint")
    lines = {ANNA: Line(name="anna", state="finished")}
    text = summary(ended, replace(View(), peers=lines), "weft --home h")
    assert text.count("of stage 2 of 2, layer") == 2
    assert "stage 2 of 2, layers 4-5 only" in text
    assert f"weft --home h gather {ended.run.run[:8]}" in text
    assert "weft --home h gather -" in text
    for verb in ("generate", "eval", "export"):
        assert f"weft --home h {verb}" not in text
    assert "all peers have the same after the same round" not in text


def test_of_a_whole_model_that_was_put_together_the_usual_is_suggested(kept: Kept) -> None:
    ended = cut(kept, Path("run") / "checkpoint")
    text = summary(ended, View(), "weft")
    assert f"weft generate {ended.run.run[:8]}\n" in text
    assert "of a section" in text
    assert "gather" not in text


def write_text(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("{}")


def test_who_held_no_part_of_the_model_reads_no_figures_and_only_what_is_there(kept: Kept, tmp_path: Path) -> None:
    nothing = replace(cut(kept, tmp_path / "checkpoint"), replica=Digest(""), loss=None, reason="stopped by Ctrl-C")
    assert summary(nothing, View(), "weft").splitlines()[1:] == [
        "run small: stopped by Ctrl-C; this peer trained nothing this time",
        "bytes        3 MB sent, 1 MB received since this start",
    ]
    write_text(tmp_path / "stage-1" / "checkpoint" / CHECKPOINT_FILE)
    assert "weft gather -" in summary(nothing, View(), "weft")
    write_text(tmp_path / "checkpoint" / CHECKPOINT_FILE)
    assert f"weft generate {nothing.run.run[:8]}" in summary(nothing, View(), "weft")


def test_of_a_sample_a_few_lines_are_shown_and_a_dot_for_what_cannot_be() -> None:
    assert excerpt("a\ufffd\x1b\x00b\tc") == "a...b\tc"
    assert excerpt("\n".join("abcdefghijkl")) == "a\nb\nc\nd\ne\nf\ng\nh\n..."
    assert max(len(line) for line in excerpt("x" * 500).splitlines()) == 80


def test_two_machines_of_one_name_are_told_apart(kept: Kept) -> None:
    lines = {BERT: Line(name="gpu", state="left", round=11), ANNA: Line(name="gpu", state="left", round=12)}
    text = summary(outcome_of(kept), replace(View(), peers=lines), "weft").splitlines()
    assert len([line for line in text if line.strip().startswith("gpu:")]) == 2
