"""`weft.extend`: codecs, outer steps and judges from outside the package, for the runs of this process.

    bits12 = weft.extend("acme.bits12", Bits12)
    config = weft.SyncConfig(samples=1_000_000, method=FedAvgConfig(codec=bits12.codec()))

Every member has to have called it with the same text before it joins (`weft.extension` says why).
"""

from dataclasses import dataclass
from typing import Any

from weft.codec.codec import Codec
from weft.codec.config import ExtensionCodecConfig
from weft.extension import Known, Value, learn, settings_of
from weft.run.reward import JudgeConfig
from weft.sync.merge.outer import Outer
from weft.sync.method.choices import ExtensionOuterConfig

__all__ = ["Codec", "Extension", "Outer", "extend"]


@dataclass(frozen=True)
class Extension:
    """What this process has learnt, to be named in a method."""

    known: Known

    def codec(self, **settings: Value) -> ExtensionCodecConfig:
        """Return it as a method's `codec` or `reply_codec`, made with `settings` on every member."""
        known = self.known
        return ExtensionCodecConfig(name=known.name, source=known.source, settings=settings_of(known.name, settings))

    def outer(self, **settings: Value) -> ExtensionOuterConfig:
        """Return it as a method's `apply`, made with `settings` on every member."""
        known = self.known
        return ExtensionOuterConfig(name=known.name, source=known.source, settings=settings_of(known.name, settings))

    def judge(self, **settings: Value) -> JudgeConfig:
        """Return it as the `judge` of a run's rewards, made with `settings` on every member."""
        known = self.known
        return JudgeConfig(name=known.name, source=known.source, settings=settings_of(known.name, settings))


def extend(name: str, make: Any) -> Extension:
    """Let this process compute with what `make` makes, in runs that name it.

    Args:
        name: lower-case letters, digits, dots, dashes and underscores, a letter first: "acme.bits12".
        make: a class or function in a file of its own. Called with a run's settings by keyword, it returns a `Codec`
            where a method has it as a codec, an `Outer` where a method has it as an outer step, and a function of
            prompt, right answers and what was said, which returns what that is worth, where a run's rewards have it.

    Raises:
        ConfigError: another name, or the text of `make` cannot be found.
    """
    return Extension(learn(name, make))
