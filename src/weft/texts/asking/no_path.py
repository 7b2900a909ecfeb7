"""What is said of a text that no members compute, and of a form that none of them holds answers to."""

from weft.chat.grammar import Form
from weft.engine.text import Wanted
from weft.errors import ConfigError, WeftError
from weft.texts.asking.path import Paths
from weft.texts.asking.text import Failed
from weft.texts.messages import MAX_FORM_NBYTES

NO_FORMS = (
    "no member of the run that draws text holds answers to a form (response_format, or a tool that must be called): "
    "they have an older weft. Leave the form out, or serve a checkpoint of the run."
)


class NoPath(WeftError):
    """Nobody computes a part of the model just now. `retry_s`: when to ask again, in seconds."""

    def __init__(self, message: str, retry_s: float = 2.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


def form_of(wanted: Wanted, paths: Paths) -> Form | None:
    """Return the form that a text is to follow; None: it is free.

    Raises:
        ConfigError: no member holds texts to it.
    """
    form = wanted.constraint
    if form is None:
        return None
    if not isinstance(form, Form):
        raise ConfigError("members hold texts to forms that can be sent alone (weft.chat.grammar).")
    if len(form.text) > MAX_FORM_NBYTES:
        raise ConfigError(
            f"members take forms of at most {MAX_FORM_NBYTES >> 10} KiB, schemas and names of tools together; this one "
            f"has {-(-len(form.text) // 1024)}. Shorten descriptions, or leave tools out."
        )
    if paths.lacks_forms:
        raise ConfigError(NO_FORMS)
    return form


REFUSED = (
    "The members that draw tokens cannot hold answers to this form: their weft reads it otherwise than this one. "
    "Leave the form out, or serve a checkpoint of the run."
)


def no_path(paths: Paths, why: Failed, *, has_form: bool, is_refused: bool = False) -> NoPath:
    """Return what is said of a text that has failed.

    Args:
        is_refused: whether a member has refused its form.
    """
    if why == "stalled":
        return NoPath("The answer came to a halt: peers answer, and no token comes. Ask again soon.")
    if empty := paths.empty:
        if paths.num_stages == 1:
            return NoPath(
                "No member of the run that this machine is linked to draws text. serve_nbytes in a member's "
                "machine file lets it."
            )
        named = ", ".join(str(stage + 1) for stage in empty)
        return NoPath(f"Nobody serves stage {named} of {paths.num_stages} just now. Ask again soon.")
    if has_form and paths.lacks_forms:
        return NoPath(NO_FORMS[0].upper() + NO_FORMS[1:])
    if is_refused:
        return NoPath(REFUSED)
    of_it = "the model" if paths.num_stages == 1 else "a stage"
    return NoPath(f"All peers that serve {of_it} are busy, or do not answer. Ask again soon.")
