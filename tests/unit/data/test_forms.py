"""Every form of file that a person may name as data is read whole, or refused in one paragraph."""

import re
from pathlib import Path

import pytest

from unit.data.forms import Form, forms
from weft.data import corpus
from weft.errors import DataError

FORMS = {form.name: form for form in forms()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_is_read_whole_or_refused(form: Form, tmp_path: Path) -> None:
    form.write(tmp_path)
    if form.refused is not None:
        with pytest.raises(DataError) as refusal:
            list(corpus.split(form.source, tmp_path, 0.5))
        assert re.search(form.refused, str(refusal.value))
        assert "\n" not in str(refusal.value)
    else:
        assert [document.text for document in corpus.documents(form.source, tmp_path) if document.text] == form.texts


def test_there_are_as_many_forms_as_names() -> None:
    assert len(FORMS) == len(list(forms())) >= 150
