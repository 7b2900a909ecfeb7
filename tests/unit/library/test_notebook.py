"""The example notebook is run by a kernel of its own, cell by cell, and shows what it says."""

from pathlib import Path

import pytest

from example import EXAMPLES

NOTEBOOK = EXAMPLES / "notebook.ipynb"
ALONE = """
from weft.net.transport.tls import TlsConfig
from weft.run.machine import PeerConfig

settings = PeerConfig(device="cpu", transports=("tls",), tls=TlsConfig(host="127.0.0.1"))
machine = weft.Machine(home="notebook-home", settings=settings)
"""
ENDS_S = 120  # of one cell; only ends a test that would hang


@pytest.mark.slow
def test_the_notebook_trains_draws_and_makes_tables(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    given = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    given.source += ALONE  # nothing but loopback
    NotebookClient(notebook, timeout=ENDS_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [each["data"]["text/html"] for each in outputs if "text/html" in each.get("data", {})]
    assert "20 rounds" in pictures[0]
    assert "<svg" in pictures[0]
    assert "heldout_loss" in pictures[1]
    assert "gradient_norm" in pictures[2]
    shown = [each["data"]["text/plain"] for each in outputs if each.output_type == "execute_result"]
    assert shown[0].startswith("('complete', 20, ")


def test_the_notebook_is_kept_without_what_it_showed() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.execution_count is None and not cell.outputs for cell in cells)
