"""Histories that no run made, for the page: one of a few peers, one of a thousand.

    few()     5 peers over 200 rounds: one dies, one comes late; samples, a change of the method, advice
    many()    1,000 peers over 100 rounds: 100,000 turns and 100,000 events

Each is one tree of JSON as `/api/history` gives it. The same seed gives the same history.
"""

import hashlib
import math
import random
from typing import Any

Row = list[Any]
Tree = dict[str, Any]

START = 1_790_000_000.0
LISTS = (
    *("peers", "states", "links", "rounds", "turns", "train", "heldout", "bytes"),
    *("samples", "methods", "events", "advice"),
)
NAMES = ("mira", "juno-lab", "kestrel", "old-faithful", "tamsin")
DEVICES = ("NVIDIA RTX 3090", "NVIDIA A10G", "Apple M2 Max", "AMD Ryzen 9, 16 threads", "NVIDIA RTX 4070")
TEXTS = (
    "Once upon a time, a the little dog was in the and he saw a big the tree.",
    "Once upon a time there was a girl named Lily. She like to play with the ball. One day she go to park.",
    "Once upon a time there was a small fox who lived by the river. Each morning he ran to the water to see his face.\n"
    "“Hello, fox,” said the river. The fox laughed, and the river laughed with him.",
)


def few(seed: int = 1, num_rounds: int = 200) -> Tree:
    """Return a run of four peers: the third dies in round 120, a fifth comes in round 60."""
    rng = random.Random(seed)
    play = _Play(rng, [*NAMES], DEVICES, tokens_of_round=22_528, num_rounds=num_rounds)
    for one in range(4):
        play.start(one, others=range(one))
    for number in range(1, num_rounds + 1):
        if number == 60:
            play.start(4, others=range(4))
        if number == 120:
            play.die(2, told_by=0)
        missing = {3: "its payload came 4.2 s after the deadline"} if number % 17 == 0 else {}
        play.round(number, missing)
        if number in {40, 110, 190}:
            text = TEXTS[(40, 110, 190).index(number)]
            play.add("samples", [play.at, number, "Once upon a time", text.removeprefix("Once upon a time")])
        if number in {1, 80}:
            words = "every 44 inner steps, int8" if number == 1 else "every 88 inner steps, int4: exchanging took 31 %"
            play.add("methods", [play.at, number, f"from round {number} on {words}"])
            play.event(0, 1, "MethodTuned", f"from round {number} on {words}")
    play.event(1, 2, "PayloadRejected", "the payload of <script>alert(1)</script> was refused: its norm is not finite")
    return play.tree


def many(seed: int = 2, num_peers: int = 1_000, num_rounds: int = 100) -> Tree:
    """Return a run of many peers, of whom some miss rounds and some go."""
    rng = random.Random(seed)
    names = [f"peer-{number:04d}" for number in range(num_peers)]
    play = _Play(rng, names, DEVICES, tokens_of_round=5_120_000, num_rounds=num_rounds)
    for one in range(num_peers):
        play.start(one, others=[rng.randrange(one) for _ in range(min(one, 4))])
    num_left = 100 * num_peers - len(play.tree["events"]) if num_rounds == 100 else 0
    for number in range(1, num_rounds + 1):
        here = sorted(play.here)
        missing = dict.fromkeys(rng.sample(here, 12), "its payload came after the deadline")
        play.round(number, missing, has_events=False)
        for _ in range(num_left // num_rounds):
            who = rng.choice(here)
            severity = rng.choices((0, 1, 2, 3), (90, 7, 2.5, 0.5))[0]
            kind = ("RoundCommitted", "MemberJoined", "RoundMissed", "CheckpointFailed")[severity]
            play.event(who, severity, kind, f"{names[who]}: round {number}, {rng.randrange(10**6):,} tokens")
        if number % 20 == 0:
            play.die(rng.choice(here), told_by=here[0])
            play.add("samples", [play.at, number, "Once upon a time", TEXTS[number // 20 % 3][16:]])
    return play.tree


class _Play:
    """A run as it is made up, with the time it has come to."""

    def __init__(
        self, rng: random.Random, names: list[str], devices: tuple[str, ...], *, tokens_of_round: int, num_rounds: int
    ) -> None:
        self.rng, self.names, self.devices, self.tokens_of_round = rng, names, devices, tokens_of_round
        self.at, self.tokens, self.moved, self.ring = START, 0, 0, 0
        self.here: set[int] = set()
        self.speeds = [rng.uniform(600, 2_400) for _ in names]
        self.done_at: dict[int, float] = {}
        self.tree: Tree = {name: [] for name in LISTS} | {
            "is_live": False,
            "is_public": False,
            "run": {
                "name": "tiny-stories",
                "id": hashlib.sha256(b"run").hexdigest(),
                "total_tokens": tokens_of_round * num_rounds,
                "tokens_per_step": 512,
                "num_parameters": 886_016,
                "method": "diloco",
            },
        }

    def add(self, name: str, row: Row) -> None:
        self.tree[name].append(row)

    def event(self, peer: int, severity: int, kind: str, text: str) -> None:
        self.add("events", [self.at, peer, severity, kind, text])

    def start(self, one: int, others: Any) -> None:
        key, device = hashlib.sha256(str(one).encode()).hexdigest(), self.devices[one % len(self.devices)]
        while len(self.tree["peers"]) <= one:
            number = len(self.tree["peers"])
            self.add("peers", [hashlib.sha256(str(number).encode()).hexdigest(), self.names[number], "", ""])
        self.tree["peers"][one] = [key, self.names[one], device, "weft 0.9"]
        self.here.add(one)
        self.at += 0.05
        self.add("states", [self.at, one, "starting", None, None, 0.0, one])
        self.event(one, 1, "PeerStarted", f"{self.names[one]} starts on {device}, weft 0.9")
        for other in set(others) & self.here:
            self.add("links", [self.at, one, other, self.rng.choice(("quic", "tcp", "relay"))])

    def die(self, one: int, told_by: int) -> None:
        self.here.discard(one)
        name = self.names[one]
        self.add("states", [self.at, one, "gone", None, None, 0.0, told_by])
        self.event(told_by, 2, "MemberGone", f"{name} is gone")
        for row in [row for row in self.tree["links"] if one in row[1:3] and row[3]]:
            self.add("links", [self.at, row[1] if row[2] == one else row[2], one, ""])
        what = "The run goes on without it. Start it again with the same command: it goes on where it was."
        self.add("advice", [self.at, one, f"{name} has been silent for 30 s and is gone.", what])

    def round(self, number: int, missing: dict[int, str], *, has_events: bool = True) -> None:
        """Let everybody who is here work, exchange, and wait for the slowest."""
        rng, here = self.rng, sorted(self.here)
        missing = {one: reason for one, reason in missing.items() if one in self.here}
        work = {one: 9_000 / self.speeds[one] * rng.uniform(0.95, 1.1) for one in here}
        exchange = {one: rng.uniform(0.6, 1.6) for one in here}
        begin = self.at
        self.at += max(work[one] + exchange[one] for one in here) + 0.3
        counted = [one for one in here if one not in missing]
        leader = counted[number % len(counted)]
        nbytes = 450_000
        for one in here:
            waits_s = max(0.0, self.at - begin - work[one] - exchange[one]) * rng.uniform(0.0, 0.2)
            end = self.at - waits_s
            sent, received = (nbytes, nbytes * 2) if one in missing else (nbytes * 2, nbytes * 2)
            self.add("turns", [end, one, number, work[one], exchange[one], sent, received, one not in missing])
            state = "left out" if one in missing else "training"
            self.add("states", [end, one, state, number, self._loss(), self.speeds[one] * rng.uniform(0.9, 1.1), one])
            self.moved += sent + received
            self.ring += int(2 * 2 * 886_016 * 2 * 44 * (len(here) - 1) / len(here) / 4.7)
        for name in ("turns", "states"):
            self.tree[name][-len(here) :] = sorted(self.tree[name][-len(here) :], key=lambda row: row[0])
        self.tokens += self.tokens_of_round
        out = [[one, reason] for one, reason in missing.items()]
        self.add("rounds", [self.at, number, 1, leader, self.tokens_of_round, self.tokens, counted, out])
        self.add("train", [self.at, self.tokens, self._loss() + rng.gauss(0, 0.03)])
        self.add("bytes", [self.at, self.tokens, self.moved, self.ring])
        if number % 5 == 0:
            self.add("heldout", [self.at, self.tokens, self._loss() + 0.09, (self._loss() + 0.09) / 3.9])
        if has_events:
            without = f", without {', '.join(self.names[one] for one in missing)}" if missing else ""
            took_s = self.at - begin
            text = f"round {number}: {len(counted)} counted{without}, {self.tokens_of_round:,} tokens in {took_s:.1f} s"
            self.event(leader, 0, "RoundCommitted", text)
            for one, reason in missing.items():
                self.event(one, 2, "RoundMissed", f"{self.names[one]} missed round {number}: {reason}")

    def _loss(self) -> float:
        done = self.tokens / (self.tree["run"]["total_tokens"] or 1)
        return 1.9 + 4.2 * math.exp(-9 * done) + 0.7 * (1 - done)
