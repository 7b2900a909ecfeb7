"""Questions whose answers can be checked, of four kinds: sums, days, sorting, and JSON out of a sentence.

    tasks = drawn(seed=1, num=2000)
    conversation(tasks[0])      a line of a file that weft trains on
    tasks[0].is_right(text)     whether that answers it

All that is random follows from the seed, and two seeds have no question in common but by chance.
"""

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft import rng

FRUIT = (
    "apple",
    "banana",
    "cherry",
    "date",
    "elder",
    "fig",
    "grape",
    "kiwi",
    "lemon",
    "mango",
    "olive",
    "pear",
    "plum",
)
NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Karl", "Lena", "Milo", "Nora")
TOWNS = ("Rome", "Oslo", "Lima", "Kyiv", "Cairo", "Paris", "Quito", "Tokyo", "Delhi", "Bonn", "Riga", "Perth", "Doha")


@dataclass(frozen=True)
class Task:
    """
    Args:
        kind: sum, day, sort or json.
        answer: as it is taught; of JSON, any text of the same value is right.
    """

    kind: str
    asked: str
    answer: str

    def is_right(self, text: str) -> bool:
        """Return whether a text answers it, up to white space at its ends and a full stop."""
        said = text.strip()
        if self.kind != "json":
            return said.removesuffix(".") == self.answer
        try:
            return bool(json.loads(said) == json.loads(self.answer))
        except ValueError:
            return False


def drawn(seed: int, num: int) -> list[Task]:
    """Return tasks, as many of each kind."""
    luck = rng.stream(seed, "tasks")
    return [_KINDS[number % len(_KINDS)](luck) for number in range(num)]


def conversation(task: Task) -> dict[str, Any]:
    """Return it as a line of a file of conversations has it."""
    turns = (("user", task.asked), ("assistant", task.answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def pair(task: Task, wrong: str) -> dict[str, Any]:
    """Return it as a line of a file of preferences has it, beside an answer that is wrong."""
    return {"prompt": task.asked, "chosen": task.answer, "rejected": wrong}


def _sum(luck: np.random.Generator) -> Task:
    a, b = (int(each) for each in luck.integers(11, 90, 2))
    sign, found = ("+", a + b) if luck.random() < 0.5 else ("-", a - b)
    return Task("sum", f"What is {a} {sign} {b}? Write the number only.", str(found))


def _day(luck: np.random.Generator) -> Task:
    first = datetime.date(2000, 1, 1) + datetime.timedelta(days=int(luck.integers(0, 10_000)))
    later = int(luck.integers(2, 20))
    found = first + datetime.timedelta(days=later)
    return Task("day", f"Which day is {later} days after {first.isoformat()}? Write it alike.", found.isoformat())


def _sort(luck: np.random.Generator) -> Task:
    words = [FRUIT[at] for at in luck.choice(len(FRUIT), int(luck.integers(3, 6)), replace=False)]
    return Task("sort", f"Sort by letter, with commas between: {', '.join(words)}", ", ".join(sorted(words)))


def _json(luck: np.random.Generator) -> Task:
    name, town = (each[int(luck.integers(len(each)))] for each in (NAMES, TOWNS))
    age = int(luck.integers(18, 90))
    value = {"name": name, "age": age, "town": town}
    asked = f"Write as JSON with name, age and town: {name}, who is {age}, lives in {town}."
    return Task("json", asked, json.dumps(value))


_KINDS: tuple[Callable[[np.random.Generator], Task], ...] = (_sum, _day, _sort, _json)
