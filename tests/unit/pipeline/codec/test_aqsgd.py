"""What two sides of a boundary hold of samples: no message builds on one thing here and on another there."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.codec import build as numbers
from weft.codec.config import Bf16Config, Int4Config, Int8Config
from weft.errors import PayloadError
from weft.pipeline.codec.activations import AqSgdConfig
from weft.pipeline.codec.aqsgd import Held
from weft.pipeline.codec.boundary import Boundary, Samples, Shape
from weft.pipeline.codec.build import Boundaries

SHAPE = Shape(seq_len=4, width=16, vocab_size=5)
SAMPLE_NBYTES = 2 * SHAPE.num
ALONE = bytes(8)


def side(**settings: object) -> Boundary:
    return Boundaries(AqSgdConfig(**settings)).boundary(SHAPE)  # type: ignore[arg-type]


def named(*names: int) -> Samples:
    return Samples(torch.zeros(len(names), SHAPE.seq_len, dtype=torch.long), names)


def drawn(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, SHAPE.seq_len, SHAPE.width, generator=torch.Generator().manual_seed(seed))


def tags(message: bytes, num: int) -> list[bytes]:
    return [bytes(message[8 * row : 8 * row + 8]) for row in range(num)]


def passed(sender: Boundary, receiver: Boundary, x: Tensor, samples: Samples) -> tuple[bytes, Tensor]:
    """Pass activations there, and a gradient back."""
    message = bytes(sender.activations.encode(x, samples))
    found = receiver.activations.decode(message, samples)
    sender.gradients.decode(receiver.gradients.encode(torch.ones_like(x), samples), samples)
    return message, found


def far(found: Tensor, x: Tensor) -> float:
    return float((found - x).norm() / x.norm())


def test_what_changes_little_comes_closer_each_time() -> None:
    sender, receiver, samples = side(), side(), named(7, 8)
    x, errors = drawn(2), []
    for turn in range(4):
        x = x + 0.01 * drawn(2, turn + 1)
        message, found = passed(sender, receiver, x, samples)
        errors.append(far(found, x))
        assert (ALONE in tags(message, 2)) == (turn == 0)
    assert errors[0] > 0.05  # what int4 alone makes of it
    assert max(errors[2:]) < 0.01  # bf16 holds no more than 1/512 of it


def test_nothing_is_built_on_before_the_gradient_has_said_that_it_is_held() -> None:
    sender, receiver, samples, x = side(), side(), named(1), drawn(1)
    for _ in range(3):
        message = bytes(sender.activations.encode(x, samples))
        assert tags(message, 1) == [ALONE]
        receiver.activations.decode(message, samples)
    sender.gradients.decode(receiver.gradients.encode(x, samples), samples)
    assert tags(bytes(sender.activations.encode(x, samples)), 1) != [ALONE]
    assert tags(bytes(sender.activations.encode(x, samples)), 1) == [ALONE]  # the gradient of that has not come


def test_a_receiver_that_starts_anew_refuses_and_then_hears_it_alone() -> None:
    sender, receiver, samples, x = side(), side(), named(1, 2), drawn(2)
    passed(sender, receiver, x, samples)
    receiver = side()
    message = sender.activations.encode(x, samples)
    with pytest.raises(PayloadError, match="not held here"):
        receiver.activations.decode(message, samples)
    again, found = passed(sender, receiver, x, samples)
    assert tags(again, 2) == [ALONE, ALONE]
    assert far(found, x) < 0.2
    assert ALONE not in tags(passed(sender, receiver, x, samples)[0], 2)  # in step once more


def test_a_sender_that_starts_anew_sends_alone_and_both_are_in_step_again() -> None:
    sender, receiver, samples, x = side(), side(), named(1, 2), drawn(2)
    for _ in range(2):
        passed(sender, receiver, x, samples)
    sender = side()
    message, found = passed(sender, receiver, x, samples)
    assert tags(message, 2) == [ALONE, ALONE]
    assert far(found, x) < 0.2
    message, found = passed(sender, receiver, x, samples)
    assert ALONE not in tags(message, 2)
    assert far(found, x) < 0.05


def test_a_message_is_decoded_to_the_same_until_a_newer_one_of_its_sample_came() -> None:
    sender, receiver, samples = side(), side(), named(1, 2)
    passed(sender, receiver, drawn(2), samples)
    message, found = passed(sender, receiver, drawn(2, 1), samples)
    assert torch.equal(receiver.activations.decode(message, samples), found)
    passed(sender, receiver, drawn(1, 2), named(1))
    with pytest.raises(PayloadError, match="not held here"):
        receiver.activations.decode(message, samples)


def test_what_is_refused_changes_nothing() -> None:
    sender, receiver, samples = side(), side(), named(1, 2)
    passed(sender, receiver, drawn(2), samples)
    message = bytes(sender.activations.encode(drawn(2, 1), samples))
    for position in (0, 8, 16):  # a tag, another, a scale that is none
        damaged = bytearray(message)
        damaged[position] ^= 255
        damaged[position + 1] ^= 255
        with pytest.raises(PayloadError):
            receiver.activations.decode(damaged, samples)
    assert far(receiver.activations.decode(message, samples), drawn(2, 1)) < 0.3


def test_what_there_is_no_room_for_is_passed_alone_and_takes_none() -> None:
    sender, receiver = side(), side(held_nbytes=3 * SAMPLE_NBYTES - 1)
    samples, x = named(1, 2, 3), drawn(3)
    passed(sender, receiver, x, samples)
    for _ in range(3):
        message, found = passed(sender, receiver, x, samples)
        assert [tag == ALONE for tag in tags(message, 3)] == [False, False, True]
        assert far(found, x) < 0.15


def test_memory_has_a_bound_and_what_is_dropped_makes_room() -> None:
    held = Held(100)
    for name in range(5):
        held.put(name, bytes(40), "message")
    assert held.used_nbytes == 80
    assert [held.get(name) is not None for name in range(5)] == [True, True, False, False, False]
    held.put(1, bytes(60), "message")
    assert held.used_nbytes == 100
    held.put(0, bytes(41), "message")  # no room for that: what is held stays as it was
    found = held.get(0)
    assert found is not None
    assert len(found.data) == 40
    held.drop(1)
    held.put(4, bytes(60), "message")
    assert held.get(4) is not None


def test_a_sender_drops_what_the_other_side_has_no_room_for() -> None:
    sender, receiver = side(held_nbytes=SAMPLE_NBYTES), side(held_nbytes=SAMPLE_NBYTES)
    receiver.activations.decode(side().activations.encode(drawn(1), named(2)), named(2))  # full, of another sample
    passed(sender, receiver, drawn(1), named(1))
    passed(sender, receiver, drawn(1), named(2))  # has room at the sender, now that 1 is of no use
    assert tags(passed(sender, receiver, drawn(1), named(2))[0], 1) != [ALONE]


def test_a_sample_that_is_in_a_micro_batch_twice_builds_on_what_is_held_once() -> None:
    sender, receiver, samples = side(values="int8"), side(values="int8"), named(5, 5, 6)
    x = drawn(3)
    for turn in range(3):
        message, found = passed(sender, receiver, x, samples)
        assert [tag == ALONE for tag in tags(message, 3)] == ([True] * 3 if turn == 0 else [False, True, False])
        assert far(found, x) < 0.02


def test_without_memory_it_is_the_plain_codec() -> None:
    sender, receiver, samples = side(held_nbytes=0), side(held_nbytes=0), named(1, 2)
    x = drawn(2)
    plain = numbers.build(Int4Config()).encode(x.flatten())
    for _ in range(3):
        message, found = passed(sender, receiver, x, samples)
        assert message == bytes(16) + bytes(plain)
        assert found.flatten().to(torch.bfloat16).float().equal(found.flatten())


def test_gradients_have_a_codec_of_their_own() -> None:
    boundary = Boundaries(AqSgdConfig(values="int4"), Int8Config()).boundary(SHAPE)
    x = drawn(2)
    assert bytes(boundary.gradients.encode(x, named(1, 2)))[16:] == bytes(
        numbers.build(Int8Config()).encode(x.flatten())
    )


# --- whatever is lost, late, said twice or forgotten ---


class Message(NamedTuple):
    samples: Samples
    data: bytes
    x: Tensor
    meant: list[bytes]  # what the sender takes the receiver to make of it


def journeys(luck: np.random.Generator, num: int) -> Iterator[tuple[Message, Tensor]]:
    """Play losses, delays, repetitions and restarts; yield what was decoded."""
    sender, receiver = side(held_nbytes=3 * SAMPLE_NBYTES), side(held_nbytes=2 * SAMPLE_NBYTES)
    there, back = list[Message](), list[tuple[Samples, bytes]]()
    for turn in range(num):
        match luck.choice(["send", "hear", "answer", "restart"], p=[0.32, 0.33, 0.33, 0.02]):
            case "send":
                samples = named(*luck.integers(0, 4, luck.integers(1, 4)).tolist())
                x = drawn(len(samples), int(luck.integers(1000)))
                data = bytes(sender.activations.encode(x, samples))
                held = [sender.activations._held.get(name) for name in samples.names]  # type: ignore[attr-defined]
                there.append(Message(samples, data, x, [b"" if each is None else each.data for each in held]))
            case "hear" if there:
                message = there[-min(int(luck.geometric(0.6)), len(there))]
                try:
                    found = receiver.activations.decode(message.data, message.samples)
                except PayloadError:
                    continue
                yield message, found
                back.append((message.samples, bytes(receiver.gradients.encode(message.x, message.samples))))
            case "answer" if back:
                samples, data = back[-min(int(luck.geometric(0.6)), len(back))]
                sender.gradients.decode(data, samples)
            case "restart":
                if luck.integers(2):
                    sender = side(held_nbytes=3 * SAMPLE_NBYTES)
                else:
                    receiver = side(held_nbytes=2 * SAMPLE_NBYTES)
        if turn % 8 == 0:
            there, back = there[-6:], back[-6:]  # the older ones are lost


def wrong(luck: np.random.Generator, num: int) -> tuple[int, int, int]:
    """Return how many messages were decoded, how many of them built on something, how many to what was not meant."""
    num_decoded = num_built = num_wrong = 0
    for message, found in journeys(luck, num):
        num_decoded += 1
        num_built += any(tag != ALONE for tag in tags(message.data, len(message.samples)))
        first = {name: row for row, name in reversed(list(enumerate(message.samples.names)))}
        for name, row in first.items():
            meant = message.meant[message.samples.names.index(name)]
            if meant:
                numbers_meant = numbers.build(Bf16Config()).decode(meant, SHAPE.num)
                num_wrong += not torch.equal(found[row].flatten(), numbers_meant)
    return num_decoded, num_built, num_wrong


@pytest.mark.full
def test_whatever_happens_what_is_decoded_is_what_was_meant() -> None:
    num_decoded, num_built, num_wrong = wrong(np.random.default_rng(0), 1000)
    assert num_wrong == 0
    assert num_decoded > 200
    assert num_built > 30


def test_without_tags_others_would_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.pipeline.codec.aqsgd._tag", lambda data: b"anything")
    assert wrong(np.random.default_rng(0), 1000)[2] > 0
