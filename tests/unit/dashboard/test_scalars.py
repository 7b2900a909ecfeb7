"""Curves: what TensorBoard's own reader finds in what was written, and what a board is told."""

import sys
from pathlib import Path

import pytest

from unit.dashboard.test_history import A, B, commit, said, started, step
from weft.dashboard.scalars import Figures, ScalarSink, make_sink
from weft.errors import ConfigError
from weft.events import Evaluated, RoundMissed, Sampled
from weft.ids import Round, Tokens
from weft.log import read_jsonl

ENTRIES = (
    said(A, started("anna"), 1.0),
    said(A, step(3.0), 2.0),
    said(A, step(2.0), 3.0),
    said(A, RoundMissed(round=Round(1), carried_tokens=Tokens(5), reason="late"), 4.0),
    said(A, commit(2, 200, A, B), 5.0),
    said(A, Evaluated(round=Round(2), loss=2.5, nats_per_byte=1.5, num_tokens=9, committed_tokens=Tokens(200)), 6.0),
    said(A, Sampled(round=Round(2), prompt="once ", text="more"), 7.0),
    said(A, commit(3, 300, A, B), 8.0),
)


class Kept:
    def __init__(self) -> None:
        self.told: list[tuple[int, Figures]] = []
        self.texts: list[str] = []
        self.is_closed = False

    def figures(self, at: float, tokens: int, values: Figures) -> None:
        assert at > 0
        self.told.append((tokens, values))

    def text(self, at: float, tokens: int, name: str, text: str) -> None:
        self.texts.append(f"{at:g} {tokens} {name}: {text}")

    def close(self) -> None:
        self.is_closed = True


def test_figures_stand_at_the_tokens_that_rounds_have_counted() -> None:
    board = Kept()
    sink = ScalarSink(board)
    for entry in ENTRIES:
        sink.write(entry)
    sink.close()
    assert [tokens for tokens, _ in board.told] == [0, 200, 200, 300]
    first, held_out, second = (values for _, values in board.told[1:])
    assert first == {
        "round/number": 2.0,
        "round/counted": 2.0,
        "round/missed": 1.0,
        "round/seconds": 5.0,
        "round/tokens_per_s": 20.0,
        "round/utilisation": 0.7,
        "bytes/sent": 10.0,
        "bytes/received": 20.0,
        "loss/train": 2.5,
        "loss/gradient_norm": 1.0,
    }
    assert held_out == {"loss/heldout": 2.5, "loss/heldout_nats_per_byte": 1.5}
    assert (second["bytes/sent"], "loss/train" in second) == (20.0, False)
    assert board.texts == ["7 200 sample: once more"]
    assert board.is_closed


def test_a_held_out_loss_stands_at_the_tokens_of_its_round_though_another_is_over() -> None:
    board = Kept()
    sink = ScalarSink(board)
    late = Evaluated(round=Round(2), loss=2.5, nats_per_byte=1.5, num_tokens=9, committed_tokens=Tokens(200))
    for entry in (said(A, commit(2, 200, A, B), 5.0), said(A, commit(3, 300, A, B), 8.0), said(A, late, 9.0)):
        sink.write(entry)
    assert [tokens for tokens, _ in board.told] == [200, 300, 200]


def test_tensorboards_reader_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = make_sink(f"tensorboard:{tmp_path}")
    for entry in ENTRIES:
        sink.write(entry)
    sink.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("loss/train")] == [(200, 2.5)]
    assert [(point.step, point.wall_time) for point in found.Scalars("bytes/sent")] == [(200, 5.0), (300, 8.0)]
    (text,) = found.Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0] == b"once more"


@pytest.mark.parametrize("where", ["tensorboard", "tensorboard:", "wandb:", "json:", "file:x", ""])
def test_what_names_no_board_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="tensorboard:FOLDER, wandb:PROJECT, json:FILE or json:-"):
        make_sink(where)


def test_what_is_not_installed_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'weft\[wandb\]'"):
        make_sink("wandb:mine")


def test_events_are_lines_for_a_collector_in_a_file_or_on_standard_error(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    entries = [said(A, started("anna")), said(A, step(3.0))]
    for where in (f"json:{tmp_path / 'out.jsonl'}", "json:-"):
        sink = make_sink(where)
        for entry in entries:
            sink.write(entry)
        sink.close()
    assert read_jsonl(tmp_path / "out.jsonl") == entries
    assert capfdbinary.readouterr().err == (tmp_path / "out.jsonl").read_bytes()


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        make_sink(f"json:{tmp_path}")
