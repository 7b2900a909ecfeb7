"""Which methods go with stages: those whose rounds all members make together, on their whole section.

It does not know sections.
"""

from weft.errors import ConfigError
from weft.sync.method.choices import Choices


def check_staged(choices: Choices) -> None:
    """Refuse methods that need the members of a stage to be out of step, or to see less than their section.

    Raises:
        ConfigError: says what to choose instead.
    """
    is_apart = choices.graph is not None or choices.among != "all" or choices.wait != "all"
    if is_apart or choices.is_streaming or choices.tune:
        raise ConfigError(
            "method: in a stage all members make each round together, of all of their section: no neighbours, no "
            "sample of members, no fragments or overlap, no tuning. Choose ddp, powersgd, fedavg, diloco, sparseloco "
            "or demo, or set stages = 1."
        )
