"""A clock that a test turns."""


class Hands:
    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at
