"""What every test shares: shapes in signatures are checked while tests of parts run, and no test asserts wall time."""

import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from budget import *  # noqa: F403  # its hooks

# Several processes test side by side: where the threads of each wait for each other, all of them crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And where a test asks for more of them: who has nothing to do sleeps, and does not take a core to look for work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Before any weft module is imported: every annotated function of these rooms checks its tensors' shapes. Elsewhere the
# checker stumbles over Protocols.
SHAPED = ["model", "codec", "data.batch"]
SHAPED += [f"sync.merge.{name}" for name in ("method", "outer", "reduce")]
SHAPED += [f"peer.state.{name}" for name in ("checkpoint", "carry", "replica")]
install_import_hook([f"weft.{room}" for room in SHAPED], "beartype.beartype")

UNIT = Path(__file__).parent / "unit"
PEERS = tuple(UNIT / room for room in ("cli", "launch", "library", "peer"))
TOGETHER = (*PEERS, *(UNIT / room for room in ("pipeline", "rig", "serve", "texts")))
STATE = UNIT / "peer" / "state"  # whose shapes are its own

# A slow machine is no fault of the code: hypothesis does not time examples.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """Leave out what tests of the parts check, for a test of many rounds: it takes a third of the time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _of_parts_alone(request: pytest.FixtureRequest) -> None:
    """Leave it out where parts are put together, too."""
    if is_in(TOGETHER, request.path) and not is_in((STATE,), request.path):
        request.getfixturevalue("shapes_unchecked")


@pytest.fixture(autouse=True)
def _heard_soon(request: pytest.FixtureRequest) -> None:
    """Let whole peers tell often how far they are: at the end of a run, however short, they wait to hear it."""
    if is_in(PEERS, request.path):
        request.getfixturevalue("monkeypatch").setattr("weft.net.membership.full_mesh.HEARTBEAT_S", 0.5)


@cache
def is_in(folders: tuple[Path, ...], path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def pytest_collection_finish() -> None:
    """Look for garbage less often: a twelfth of the time of a suite that makes many small objects goes there."""
    gc.collect()
    gc.freeze()  # all that was imported stays
    gc.set_threshold(50_000, 20, 100)
