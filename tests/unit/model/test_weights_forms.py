"""Every form of model folder gives transformers' loss from the same folder, or is refused in one paragraph."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unit.model.folder_forms import SHAPE, Form, forms
from weft.errors import ConfigError
from weft.model.flat import assemble
from weft.model.weights import read_folder, write_folder

with warnings.catch_warnings():
    # Importing transformers sets off deprecations inside its own dependencies.
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers

FORMS = {form.name: form for form in forms()}


@pytest.fixture(autouse=True)
def _offline_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def make(form: Form, folder: Path) -> None:
    config = getattr(transformers, f"{form.kind}Config")(**{**SHAPE, **form.fields})
    model = getattr(transformers, f"{form.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.15 if parameter.dim() == 2 else 0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    for edit in form.edits:
        edit(folder)


def their_loss(folder: Path, tokens: torch.Tensor) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


def our_loss(folder: Path, tokens: torch.Tensor) -> float:
    model = assemble(*read_folder(folder))
    with torch.no_grad():
        return float(model.loss(tokens[:, :-1], tokens[:, 1:]))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_folder_gives_their_loss_or_is_refused(form: Form, tmp_path: Path) -> None:
    make(form, tmp_path / "theirs")
    if form.refused is not None:
        with pytest.raises(ConfigError) as refusal:
            read_folder(tmp_path / "theirs")
        assert re.search(form.refused, str(refusal.value))
        assert "\n" not in str(refusal.value)
        assert ".." not in str(refusal.value).replace("../", "")
        return
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 48))
    expected = their_loss(tmp_path / "theirs", tokens)
    for edit in form.ours:
        edit(tmp_path / "theirs")
    assert our_loss(tmp_path / "theirs", tokens) == pytest.approx(expected, rel=1e-4)
    write_folder(tmp_path / "ours", *read_folder(tmp_path / "theirs"))
    assert our_loss(tmp_path / "ours", tokens) == pytest.approx(expected, rel=1e-4)
    assert their_loss(tmp_path / "ours", tokens) == pytest.approx(expected, rel=1e-4)


def test_there_are_as_many_forms_as_names() -> None:
    assert len(FORMS) == len(list(forms())) >= 60


logging.getLogger("transformers").setLevel(logging.ERROR)
