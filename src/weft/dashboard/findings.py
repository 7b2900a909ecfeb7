"""What members find of each other's work, in words: the texts of `words` that have several cases."""

from weft import events
from weft.ids import PeerId


def strays(e: events.MemberStrays, _own: PeerId) -> str:
    if e.is_back:
        steps = "training steps of {member:peer} are as long as the same made by {me:peer} again"
        return steps if e.what == "steps" else "the {what} of {member:peer} is like the others' again"
    if e.what == "steps":
        side = "longer" if e.value > 0 else "shorter"
        return (
            f"training steps of {{member:peer}} are {side} than the same made by {{me:peer}}, nearly each time, by "
            f"{abs(e.value):.2g} on average: that is within what is held for honest, and no rounding"
        )
    if e.what == "loss":
        return "the loss of {member:peer} is {value:.2f}, and the others' is {usual:.2f}: other data or rates?"
    times = f"{e.value / e.usual:.3g} times" if e.value > e.usual else f"1/{e.usual / e.value:.3g}"
    return f"an update of {{member:peer}} is {times} as large as the others': other data or rates?"


def not_learning(e: events.NotLearning, _own: PeerId) -> str:
    outdated = "" if e.num_members == 1 else ", or rounds count outdated work"  # one peer's work never is
    return (
        "after {committed_tokens:,} tokens the members' loss is {loss:.2f}, no lower than the {first_loss:.2f} at the "
        f"start: learning rates may be too high{outdated}"
    )


def strays_advice(e: events.MemberStrays) -> tuple[str, str, str] | None:
    if e.is_back:
        return None
    if e.what == "steps":
        return (
            "member",
            "Training steps of {member:peer} are all on one side of the same made by others.",
            "They are audited more often now. If it is yours: a changed library, or a broken processor, does that.",
        )
    return (
        "member",
        "The {what} of {member:peer} is far from the others'.",
        "Ask its owner about its data and settings. Whoever may change the run can remove it: weft act remove.",
    )


def work_doubted(e: events.WorkDoubted, _own: PeerId) -> str:
    if e.outcome == "unanswered":
        return "{me:peer} was not shown training steps of {member:peer} in round {round}: {why}"
    return "training steps of {member:peer} in round {round} are not what it says: {why}"


def rounds_unlike(e: events.RoundsUnlike, _own: PeerId) -> str:
    whose = f"{e.num_unlike} of {e.num_members} members" if e.num_members > 1 else "a member"
    text = (
        "training steps made again by {me:peer} end up to {distance:.2g} from those of "
        f"{whose}, and up to {{held:.2g}} is held for honest: "
    )
    if e.num_members >= 2 and 2 * e.num_unlike > e.num_members:
        return text + "this machine computes otherwise than most"
    if e.distance > e.held:
        return text + "theirs are false, or this machine computes otherwise"
    return text + "one of both rounds otherwise than others do"


def merge_doubted(e: events.MergeDoubted, _own: PeerId) -> str:
    if e.outcome == "unanswered":
        return "{me:peer} was not shown what was brought to {member:peer} in round {round}: {why}"
    return "{member:peer} has merged something else of round {round}: {why}"
