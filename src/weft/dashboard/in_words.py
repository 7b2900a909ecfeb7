"""The choices of a run's method in one line, for a person."""

import msgspec

from weft.sync.method.choices import Choices


def in_words(choices: Choices) -> str:
    """Return the five choices, and what of the rest is not as usual."""
    said = [
        f"every {choices.every} inner steps" if choices.every > 1 else "every inner step",
        f"{choices.send} in {_named(choices.codec)}",
    ]
    if choices.reply != choices.codec:
        said.append(f"back in {_named(choices.reply)}")
    if choices.feedback is not None or choices.reply_feedback is not None:
        said.append("with feedback")
    if choices.fragments > 1:
        said.append(f"in {choices.fragments} fragments")
    if choices.overlap:
        said.append(f"overlapping {choices.overlap} steps")
    said.append("among all" if choices.among == "all" else f"among {_named(choices.among)}")
    said.append(f"{choices.merge} applied by {_named(choices.apply)}")
    if choices.wait != "all":
        said.append("waiting for whoever is ready")
    return ", ".join(said)


def _named(config: msgspec.Struct | str) -> str:
    """Return a choice by its name, with its numbers: nesterov (lr 0.7, momentum 0.9)."""
    if isinstance(config, str):
        return config
    tag = str(config.__struct_config__.tag)
    numbers = (f"{name} {getattr(config, name)}" for name in config.__struct_fields__)
    inside = ", ".join(numbers)
    return f"{tag} ({inside})" if inside else tag
