"""Whether this process can compute by a method: its codecs and outer step may be from outside of weft.

It does not know how they are made known (`weft.extension`).
"""

from weft.sync.merge import outer as optimizers
from weft.sync.merge.coding import codec_in, reply_codec_in
from weft.sync.method.choices import Choices, ExtensionOuterConfig


def require(choices: Choices) -> None:
    """Refuse what this process cannot compute with.

    Raises:
        ConfigError: a codec or an outer step from outside of weft, which it does not know.
    """
    codec_in(choices, 0)
    reply_codec_in(choices, 0)
    if isinstance(choices.apply, ExtensionOuterConfig):
        optimizers.build(choices.apply)
