"""Which process of a site a command is: as torchrun says, and no other program's environment."""

import pytest

from weft.cli.run.torchrun import rank_of
from weft.errors import ConfigError
from weft.ranks.launch import Rank

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def test_a_rank_is_what_torchrun_says() -> None:
    assert rank_of(TORCHRUN) == Rank(rank=5, local_rank=1, num_ranks=8, num_local=4)


def test_what_other_launchers_say_makes_no_site() -> None:
    assert rank_of({name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}) is None


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE"])
def test_an_environment_that_is_not_whole_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="torchrun has not said"):
        rank_of({**TORCHRUN, name: "many"})
    with pytest.raises(ConfigError, match="torchrun has not said"):
        rank_of({key: value for key, value in TORCHRUN.items() if key != name})
