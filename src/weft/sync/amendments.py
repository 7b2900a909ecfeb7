"""The settings of a run after an amendment, and which amendments it cannot go on with."""

from msgspec import UNSET
from msgspec.structs import replace

from weft.codec.config import ExtensionCodecConfig, RandomKConfig
from weft.errors import ConfigError
from weft.sync.records.acts import Amend, Void, changes_of
from weft.sync.records.charter import MAX_TOKENS_PER_STEP, Charter, Settings


def amended(charter: Charter, cursor: int, amend: Amend) -> Charter:
    """Return the charter after an amendment.

    Args:
        cursor: where the next leases begin.

    Raises:
        Void: the run has these settings, or cannot go on with them.
    """
    settings = amended_settings(charter, amend)
    if settings == charter.settings:
        raise Void("the run has these settings already")
    if settings.seq_len == charter.settings.seq_len:
        return replace(charter, settings=settings)
    return replace(charter, settings=settings, resized_at=cursor, tokens_before=charter.leased_tokens(cursor))


def amended_settings(charter: Charter, amend: Amend) -> Settings:
    """Return the settings of `charter` with what `amend` changes.

    Raises:
        Void: the run cannot go on with them.
    """
    before, changed = charter.settings, changes_of(amend)
    of_method = {name: changed.pop(name) for name in ("every", "codec", "reply_codec", "apply") if name in changed}
    if "apply" in of_method and type(of_method["apply"]) is not type(before.method.apply):
        kind = before.method.apply.__struct_config__.tag
        raise Void(f"the outer step is {kind!r}, and its memory fits no other: change only its rates")
    try:
        settings = replace(before, **changed, method=replace(before.method, **of_method))
    except ConfigError as error:
        raise Void(str(error)) from None
    for codec in (settings.method.codec, settings.method.reply_codec):
        if isinstance(codec, ExtensionCodecConfig) and codec not in (before.method.codec, before.method.reply_codec):
            raise Void(f"codec {codec.name!r} is from outside of weft, and members may not have it")
    if charter.audits and charter.audits.quarantine and isinstance(settings.method.codec, RandomKConfig):
        raise Void("what newcomers bring has to be the same bytes in the next round, and random_k makes others in each")
    if settings.seq_len > charter.max_seq_len:
        raise Void(f"a seq_len of {settings.seq_len} is more than the {charter.max_seq_len} that model and data allow")
    if charter.min_seq_len is not UNSET and settings.seq_len < charter.min_seq_len:
        raise Void(f"the run's data lie in samples of {charter.min_seq_len} tokens, which seq_len cannot change")
    if settings.batch_size * settings.seq_len > MAX_TOKENS_PER_STEP:
        raise Void(f"one training step may take at most {MAX_TOKENS_PER_STEP:,} tokens")
    return settings
