"""Gradients that are not their samples': shown by one number of one operation, and of an honest step nothing is."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from unit.training.numerics.test_decoder import FORMS
from unit.verify.evidence.forge import ME
from unit.verify.evidence.program.signed import SAMPLES, SEED, TOKENS, Step, data_of, rules_of, signed_step, words_at
from weft.data.batch import Batches
from weft.data.rows import written
from weft.data.store import ShardStore
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.sync.records.acts import MAX_CONTRADICTION_NBYTES, Warrant
from weft.verify.evidence.evidence import read
from weft.verify.evidence.operations import contradiction, program_of, prove_operation, read_by, tree_of
from weft.verify.evidence.program.evaluate import as_words, listed
from weft.verify.evidence.program.operation import Operation, Parameters
from weft.verify.evidence.program.step import Program, program
from weft.verify.evidence.records import FalseOperation
from weft.verify.evidence.shown import Unproven, numbers_slice
from weft.wire import Signed, digest, digest_of, encode, seal

FORMS_HERE: list[dict[str, Any]] = [{}, FORMS["queries and keys normed"], FORMS["biases"], FORMS["head apart"]]


def kind_of(operation: Operation) -> tuple[object, ...]:
    kind = operation.kind
    names = (each.name for each in dataclasses.fields(kind) if each.name.startswith(("what", "is_", "has_", "seen")))  # type: ignore[arg-type]
    operands = tuple(isinstance(each, Parameters) for each in operation.operands)
    return type(kind), operands[:6], *(str(getattr(kind, name)) for name in names)


def of_each_kind(step: Step) -> Iterator[int]:
    seen = set[tuple[object, ...]]()
    for number, operation in enumerate(step.made.program.operations):
        if (kind := kind_of(operation)) not in seen:
            seen.add(kind)
            yield number


def require_proven(step: Step, number: int, at: int) -> FalseOperation:
    false, names = step.changed(number, at)
    shown, made = step.proven(number, false, names), step.listing(names)
    lie = read(step.letters(made), encode(shown))
    name = step.made.program.operations[number].name
    assert (lie.peer, lie.work) == (ME.peer, digest_of(step.letters(made)[0]))
    assert lie.what == f"its gradient is not that of its samples ({name})"
    assert shown.at == at // (false.dtype.itemsize // 4)
    with pytest.raises(Unproven):  # of what an honest worker has signed, the same shows nothing
        read(step.letters(step.listing()), encode(shown))
    with pytest.raises(Unproven, match="came to what it should"):
        step.proven(number, step.made.outputs[number], step.names)
    return shown


@pytest.mark.parametrize("form", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2, 3))])
def test_one_false_number_of_any_operation_is_proven(form: int) -> None:
    step, luck = signed_step(**FORMS_HERE[form]), random.Random(form)
    for number in of_each_kind(step):
        num = len(as_words(step.made.outputs[number]))
        require_proven(step, number, luck.randrange(num))


@pytest.mark.full
def test_one_false_number_of_every_fourth_operation_is_proven() -> None:
    step, luck = signed_step(), random.Random(9)
    for number in range(0, len(step.made.program.operations), 4):
        require_proven(step, number, luck.randrange(len(as_words(step.made.outputs[number]))))


def test_no_honest_number_is_proven_false() -> None:
    """Each number that is shown as if it were false is what it is made of."""
    step = signed_step()
    for number in list(of_each_kind(step))[::2]:
        false, names = step.changed(number, 0)
        shown = step.proven(number, false, names)
        index = encode(listed(step.made.program, number, step.made.outputs[number]))
        path = tree_of(step.names).path(number)
        honest = replace(shown, output=replace(shown.output, index=index, path=path), has=_window(step, number, shown))
        operands = tuple(replace(each, path=tree_of(step.names).path(each.path.index)) for each in shown.operands)
        with pytest.raises(Unproven, match="the number is what the operation comes to"):
            read(step.letters(step.listing()), encode(replace(honest, operands=operands)))


def _window(step: Step, number: int, shown: FalseOperation) -> Any:
    output = as_words(step.made.outputs[number])
    width = len(output) // step.made.program.operations[number].kind.num
    return numbers_slice(output, range(shown.at * width, (shown.at + 1) * width))


# --- words ---


def test_words_are_those_that_members_train_on(tmp_path: Path) -> None:
    index, shards = data_of(29)
    store = ShardStore(tmp_path)
    for each in shards.values():
        store.put(each)
    batches = Batches(store, index, "train", TOKENS, SEED)
    for positions in (range(7), range(200, 260), range(10_000, 10_010)):
        found = written(batches.at(np.array(positions))).numpy()
        assert np.array_equal(found, words_at(index, shards, positions))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_other_words_than_the_leased_ones_are_proven(dtype: str) -> None:
    step = signed_step(dtype)
    for at in range(0, SAMPLES * (TOKENS + 1), 5):
        shown = require_proven(step, 0, at)
        assert shown.data == step.data
    elsewhere = data_of(29, "uint32" if dtype == "uint16" else "uint16")[0]
    letters = step.letters(step.listing(step.changed(0, at)[1]))
    for data in (elsewhere, UNSET):
        with pytest.raises(Unproven, match="the data are not the run's"):
            read(letters, encode(replace(shown, data=data)))


# --- lists ---


def falsely(step: Step, names: tuple[Digest, ...], made: Any) -> str:
    number = contradiction(step.made.program, made, names)
    assert number is not None
    shown = step.listed_falsely(number, names, made, None)
    return read(step.letters(made), encode(shown)).what


def test_lists_that_contradict_what_was_signed_are_proven() -> None:
    step = signed_step()
    assert contradiction(step.made.program, step.listing(), step.names) is None
    longer = (*step.names, step.names[0])
    assert "other operations" in falsely(step, longer, step.listing(longer))
    other = step.listing(gradient=digest(b"another"))
    assert "is not the one that its training step went along" in falsely(step, step.names, other)
    shorter = step.listing(norm=step.made.length / 2)
    assert "length" in falsely(step, step.names, shorter)
    for number in (0, 3, step.made.program.gradient, len(step.names) - 1):
        with pytest.raises(Unproven, match="it lists what belongs there"):
            step.listed_falsely(number, step.names, step.listing(), None)


def test_an_output_of_another_shape_is_proven() -> None:
    step, names = signed_step(), list(signed_step().names)
    index = encode(listed(step.made.program, 5, step.made.outputs[5][:-1]))
    names[5] = digest(index)
    made = step.listing(tuple(names))
    lie = read(step.letters(made), encode(step.listed_falsely(5, tuple(names), made, index)))
    assert "another shape" in lie.what
    right = encode(listed(step.made.program, 5, step.made.outputs[5]))
    with pytest.raises(Unproven):
        step.listed_falsely(5, step.names, step.listing(), right)


# --- changes ---


def refused(letters: tuple[Signed, Signed], shown: bytes, num: int, seed: int) -> None:
    luck = random.Random(seed)
    for _ in range(num):
        at = luck.randrange(len(shown))
        other = bytes((*shown[:at], shown[at] ^ 1 << luck.randrange(8), *shown[at + 1 :]))
        with pytest.raises(Unproven):
            read(letters, other)


def mutated(num: int) -> None:
    step = signed_step()
    names = [each.name for each in step.made.program.operations]
    for number in (0, names.index("samples 0 to 1: 1.scores"), names.index("samples 2 to 2: 0.qkv.weight.slope")):
        false, listing = step.changed(number, 0)
        shown = encode(step.proven(number, false, listing))
        refused(step.letters(step.listing(listing)), shown, num, number)
    made = step.listing(norm=1.0)
    last = len(step.names) - 1
    refused(step.letters(made), encode(step.listed_falsely(last, step.names, made, None)), num, last)


def test_any_change_of_it_is_refused() -> None:
    mutated(50)


@pytest.mark.full
def test_any_of_many_changes_of_it_is_refused() -> None:
    mutated(400)


def test_what_is_shown_less_or_more_proves_nothing() -> None:
    step = signed_step()
    number = step.made.numbered("0.qkv")
    false, names = step.changed(number, 7)
    shown, letters = step.proven(number, false, names), step.letters(step.listing(names))
    assert isinstance(shown, FalseOperation)
    for other in (
        replace(shown, read=shown.read[:-1]),
        replace(shown, read=(*shown.read, shown.read[0])),
        replace(shown, operands=()),
        replace(shown, before=UNSET),
        replace(shown, at=shown.at + 1),
        replace(shown, at=len(false)),
    ):
        with pytest.raises(Unproven):
            read(letters, encode(other))
    unsigned = step.letters(replace(step.listing(names), operations=UNSET))
    with pytest.raises(Unproven):
        read(unsigned, encode(shown))
    assert Warrant(letters=letters, shown=encode(shown)).nbytes < 40_000
    with pytest.raises(Unproven, match="the run's data are not here"):
        prove_operation(
            step.work,
            step.listing(step.changed(0, 0)[1]),
            step.ground,
            step.before,
            step.made.parameters,
            step.changed(0, 0)[1],
            0,
            as_words(step.changed(0, 0)[0]),
            {0: step.made.outputs[0]},
            step.data,
            lambda _name: None,
        )


# --- bounds ---

LARGE = ModelConfig(
    vocab_size=32_000,
    num_layers=2,
    num_heads=32,
    num_kv_heads=32,
    width=4096,
    ffn_width=16_384,
    max_seq_len=2048,
    is_tied=True,
)


OF_STATE = 160_000  # bytes of the list of a state of 200 million parameters


def shown_nbytes(found: Program, number: int) -> int:
    """Return about how many bytes show one number of an operation."""
    operation, pieces, num_read = found.operations[number], 1, 1
    sources = set[int | Parameters | None]()

    def read(operand: int, start: int, num: int) -> Any:
        nonlocal pieces, num_read
        source = operation.operands[operand] if operation.operands else None
        sources.add(source)
        pieces += (start + num - 1) // 256 - start // 256 + 1
        num_read += 2  # where it lies in two chunks
        dtype = found.operations[source].kind.dtype if isinstance(source, int) else np.float32
        return np.zeros(num, dtype)

    operation.one(operation.kind.num - 1, read)
    shown = [number, *(each for each in sources if isinstance(each, int))]
    lists = sum(1200 + 67 * -(-found.operations[each].num_words // (1 << 18)) for each in shown)
    of_slice = 2 * 10 * 34 + 40
    return (
        1024 * pieces
        + of_slice * (num_read + 1)
        + lists
        + OF_STATE * any(isinstance(each, Parameters) for each in sources)
    )


@pytest.mark.parametrize(("samples", "changes"), [(8, {}), (32, {"vocab_size": 16_384, "ffn_width": 8192})])
def test_evidence_of_long_rows_is_small_enough(samples: int, changes: dict[str, int]) -> None:
    """Sums of 32,768 products, and of 16,384 tokens."""
    found = program(replace(LARGE, **changes), samples, 512, samples)
    most = max(range(found.gradient), key=lambda number: shown_nbytes(found, number))
    assert 200_000 < shown_nbytes(found, most) < MAX_CONTRADICTION_NBYTES, found.operations[most].name


def test_a_charter_cannot_make_who_checks_work_for_long() -> None:
    data, _ = data_of(29)
    huge: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"num_layers": 1024}, {"batch_size": 1 << 16}),
        ({"width": 1 << 16, "num_layers": 8, "ffn_width": 1 << 18}, {}),
        ({"head_width": 1 << 16}, {}),
    ]
    for changes, settings in huge:
        with pytest.raises(Unproven, match="too large"):
            program_of(
                rules_of(replace(signed_step().charter.audits.exact.gradient.model, **changes), data, **settings)
            )  # type: ignore[union-attr]


def test_a_run_whose_gradients_are_of_more_is_judged_by_a_majority() -> None:
    step = signed_step()
    charter = step.charter
    assert charter.audits
    assert charter.audits.exact
    without = replace(charter, audits=replace(charter.audits, exact=replace(charter.audits.exact, gradient=UNSET)))
    pulled = replace(charter, settings=replace(charter.settings, method=replace(charter.settings.method, proximal=0.1)))
    for each in (without, pulled):
        with pytest.raises(Unproven):
            program_of(each)


def test_a_listed_step_of_another_key_proves_nothing() -> None:
    step = signed_step()
    false, names = step.changed(4, 0)
    shown = encode(step.proven(4, false, names))
    other = replace(step.listing(names), work=digest(b"another"))
    with pytest.raises(Unproven, match="of another work"):
        read((seal(ME, step.work), seal(ME, other)), shown)
    assert read_by(step.made.program, 4)[-1] == 4
