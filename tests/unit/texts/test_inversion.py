"""What members of stages between others can read: activations hide no text from whoever has the weights before them.

No fault that could be mended: it is what `docs/threat_model.md` says, shown.
"""

import numpy as np
from benchmarks._signed_texts import stages_of

from unit.engine.test_step import CONFIG, text_of, vector_of
from weft.texts.section import Section, Work, packed

TEXT = text_of(6, 1)
PAGES = (0,)


def rows_of(section: Section, tokens: list[int], start: int = 0) -> np.ndarray:
    """Return what the first stage sends on of tokens that follow on those before `start`."""
    (done,) = section.compute([Work(packed(tokens), len(tokens), start, PAGES)])
    width = section.row_nbytes
    return np.stack([section.row_of(done.data[at : at + width]) for at in range(0, len(done.data), width)])


def test_a_stage_between_others_reads_the_text_off_its_activations() -> None:
    seen = rows_of(stages_of(CONFIG, vector_of(CONFIG), "bf16", 3, 4)[0], TEXT)
    own = stages_of(CONFIG, vector_of(CONFIG), "bf16", 3, 4)[0]  # every member has had these weights, or can fetch them
    found = list[int]()
    for place, row in enumerate(seen):
        apart = [float(np.abs(rows_of(own, [token], place)[0] - row).sum()) for token in range(CONFIG.vocab_size)]
        found.append(int(np.argmin(apart)))
        rows_of(own, found[-1:], place)  # its keys and values, for the places after it
    assert found == TEXT
