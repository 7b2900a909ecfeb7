"""A judge from outside of weft: the nearer the last number of an answer is to the right one, the more it is worth.

    weft train reward.toml --code examples/judge.py        with this in the run file, in the place of type = "match":
    weft join - --code examples/judge.py                       [reward]
                                                               type = "extension"
                                                               judge = {name = "example.near"}

It is called on every member that trains, with the same words, and should say the same of them everywhere.
"""

import re

import weft

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Near:
    """1 where the number is right, and 0 where it is off by `width` of it, or more."""

    def __init__(self, width: float = 1.0) -> None:
        self.width = width

    def __call__(self, prompt: str, answers: tuple[str, ...], said: str) -> float:
        found = NUMBER.findall(said)
        if not found or not answers:
            return 0.0
        off = min(abs(float(found[-1]) - float(right)) / max(abs(float(right)), 1.0) for right in answers)
        return max(0.0, 1.0 - off / self.width)


near = weft.extend("example.near", Near)
