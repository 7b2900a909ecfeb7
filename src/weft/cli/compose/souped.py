"""`weft compose evaluate` of a mean of weights: a member, beside those that it was made of and their controls."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.compose.parts import Known, reader
from weft.errors import ConfigError, NoSuchRun
from weft.ids import short

if TYPE_CHECKING:
    from weft.compose.controls import Report, Row
    from weft.data.rows import Batch


def soup_at(given: str, home: Path) -> Known | None:
    """Return the member that a person means, if it is the mean of others' weights; None: something else."""
    from weft.compose.member import read_member
    from weft.compose.registry import Registry

    try:
        folder = Registry(home).find(given)
    except NoSuchRun:
        return None
    member = read_member(folder)
    return Known(folder, member) if member.origins and member.origins[-1].how == "soup" else None


def ingredients(soup: Known, home: Path) -> list[Known]:
    """Return the members that a soup is the mean of.

    Raises:
        ConfigError: one is not in this home.
    """
    from weft.compose.member import read_member
    from weft.compose.registry import Registry

    registry, wanted = Registry(home), soup.member.origins[-1].of
    found = [registry.holding(weights, besides=soup.folder) for weights in wanted]
    if missing := [short(weights) for weights, folder in zip(wanted, found, strict=True) if folder is None]:
        raise ConfigError(
            f"{soup.member.name} is a mean of members that are not in this home: the weights {', '.join(missing)}. It "
            "is told beside them, or not at all. Bring them: weft compose member FOLDER."
        )
    return [Known(folder, read_member(folder)) for folder in found if folder is not None]


def told(
    soup: Known, parts: Sequence[Known], text: "Batch", home: Path, device: str, monolith: "Row | None"
) -> "Report":
    """Return the losses of a soup and of its controls. The best member is chosen on the same text.

    Args:
        text: on the device.
    """
    from weft.compose.controls import OF_EXPERTS, Report, Row, ensemble, losses
    from weft.compose.member import flops_together
    from weft.model.flat import assemble

    read = reader(home, device)
    mean, *models = [assemble(*read(each.folder)) for each in (soup, *parts)]
    alone = tuple(
        Row(each.member.name, losses(model, text), each.member.flops or None)
        for each, model in zip(parts, models, strict=True)
    )
    together = flops_together([each.member for each in parts])
    return Report(
        composed=Row(soup.member.name, losses(mean, text), together),
        exits=(),
        members=alone,
        needed=OF_EXPERTS,
        controls={
            "best single": min(alone, key=lambda each: each.loss),
            "ensemble": Row("ensemble", ensemble(models, text), together),
            "monolith": monolith,
        },
    )
