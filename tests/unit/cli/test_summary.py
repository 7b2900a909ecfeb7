"""What a person reads at the end of a run."""

from dataclasses import replace
from pathlib import Path

from unit.cli.small import Kept
from weft.cli.summary import summary
from weft.cli.view import Line, View
from weft.ids import Digest, PeerId, Round, Tokens
from weft.peer.peer import Outcome

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
    text = summary(outcome_of(kept), replace(View(), ring_nbytes=400_000_000), "weft --home h")
    for words in (
        "run small: complete after 12,000 tokens, round 12",
        "held-out     1.2500 nats per token, 1.5000 nats per byte",
        "bytes        3 MB sent, 1 MB received; bf16 ring DDP: 400 MB, 100x as much",
        "checkpoint   checkpoint",
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
    text = summary(outcome_of(kept), replace(View(), lines=lines), "weft").splitlines()
    start = text.index(f"replica      {'d' * 64}")
    assert [line.strip() for line in text[start + 1 : start + 4]] == [
        "this peer's; each of the others prints its own, the same one after the same round",
        "anna: joined",
        "bert: left, last heard of at round 11",
    ]
