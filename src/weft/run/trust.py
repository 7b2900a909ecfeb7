"""The table `[trust]`: how much of a run can be looked up and checked by who was not there."""

from msgspec import UNSET, UnsetType

from weft.config import Config


class MembersTrust(Config, frozen=True, kw_only=True, tag_field="type", tag="members"):
    """Members believe each other, and newcomers those that give them the state."""


class RecordedTrust(Config, frozen=True, kw_only=True, tag_field="type", tag="recorded"):
    """Each round names all rounds before, and each vote the state: newcomers check the state that they are given, and
    anybody can be shown who was counted, and for what (`weft ledger`)."""


TrustConfig = MembersTrust | RecordedTrust


def of_run(trust: TrustConfig) -> RecordedTrust | UnsetType:
    """Return what a run's config has of it: one that says nothing is as they were before."""
    return UNSET if isinstance(trust, MembersTrust) else trust
