"""What every test shares: shapes in signatures are checked while tests run, and no test asserts wall time."""

import gc
import os
from collections.abc import Iterator

import jaxtyping
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from budget import *  # noqa: F403  # its hooks

# Several processes test side by side: where the threads of each wait for each other, all of them crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before any weft module is imported: every annotated function of these rooms checks its tensors' shapes. Elsewhere the
# checker stumbles over Protocols.
SHAPED = ["model", "codec", "data.batch"]
SHAPED += [f"sync.merge.{name}" for name in ("method", "outer", "reduce")]
SHAPED += [f"peer.state.{name}" for name in ("checkpoint", "carry", "replica")]
install_import_hook([f"weft.{room}" for room in SHAPED], "beartype.beartype")

# A slow machine is no fault of the code: hypothesis does not time examples.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """Leave out what tests of the parts check, for a test of many rounds: it takes a third of the time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_finish() -> None:
    """Look for garbage less often: a twelfth of the time of a suite that makes many small objects goes there."""
    gc.collect()
    gc.freeze()  # all that was imported stays
    gc.set_threshold(50_000, 20, 100)
