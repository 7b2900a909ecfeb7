"""Who dies and who comes, as methods are put to it: one for another in the middle of a round, or two and back again."""

from collections.abc import Sequence
from typing import Any

from scenarios.swarm import Life, Member, Swarm
from weft.events import StateJoined
from weft.ids import PeerId
from weft.sync.records.messages import Ready


def replace_in_mid_round(swarm: Swarm, victim: Member, newcomer: Member) -> None:
    """Kill one once it has announced what it brings to its third round, or a later one; another comes at once."""

    def kill_once_it_has_announced(life: Life, _to: PeerId, message: object) -> bool:
        if life.member is victim and isinstance(message, Ready) and len(life.committed) >= 2 and not newcomer.lives:
            swarm.kill(victim)
            swarm.launch(newcomer)
        return True

    swarm.watchers.append(kill_once_it_has_announced)


def assert_it_came(newcomer: Member, stays: Member) -> None:
    assert newcomer.life.seen(StateJoined)
    assert any(newcomer.id in event.contributors for event in stays.life.committed)


async def kill_two_in_turn(swarm: Swarm, members: Sequence[Member], seed: int, **options: Any) -> list[Any]:
    """Kill two of the members, one after the other, each back two rounds later; return how those alive end."""
    num = len(members)
    stays = members[(seed + 1) % num]
    await swarm.round(stays, 2)
    for victim in (members[seed % num], members[(seed + 2) % num]):
        swarm.kill(victim)
        await swarm.round(stays, stays.peer.replica.head.round + 2)  # type: ignore[union-attr]
        swarm.launch(victim, **options)
    return await swarm.done(*(member for member in members if member.life.is_running))
