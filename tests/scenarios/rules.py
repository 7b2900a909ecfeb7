"""What must hold after any scenario, told from the log and the manifests (R1 to R4), in one place for all scenarios.

R1  one manifest for each round of a branch, and one replica in the end
R2  no work is counted twice, and what is not counted is still carried, or was said to be given up (of each step of a
    swarm: `scenarios.ledger`)
R3  each commit names everybody of its electorate: as counted, or left out with a reason
R4  no wait that measured times do not ask for
"""

from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise

from weft.events import BranchLeft, Event, LegacyDropped, RoundCommitted
from weft.ids import BranchId, Digest, PeerId, Round
from weft.sync.records.ancestry import History, Stretch
from weft.sync.records.messages import Counted, GroupRecord, Manifest

NO_RECORDS: Mapping[Digest, GroupRecord] = {}

Place = tuple[BranchId, Round]


def one_history(commits: Iterable[RoundCommitted]) -> None:
    """R1, of what all members have said."""
    named: dict[Place, str] = {}
    for event in commits:
        known = named.setdefault((event.branch, event.round), event.manifest)
        assert known == event.manifest, f"two manifests for round {event.round}"


def counted(manifests: Iterable[Manifest], records: Mapping[Digest, GroupRecord] = NO_RECORDS) -> dict[PeerId, int]:
    """Return the tokens of each peer that manifests count: its own work, not what it brought of a branch.

    Args:
        records: whom groups counted, by digest.
    """
    tokens: dict[PeerId, int] = {}
    for manifest in manifests:
        for each in manifest.contributions:
            for peer, num in stakes(each, records):
                tokens[peer] = tokens.get(peer, 0) + num
    return tokens


def stakes(each: Counted, records: Mapping[Digest, GroupRecord] = NO_RECORDS) -> list[tuple[PeerId, int]]:
    """Return whose own work a contribution is, and how many tokens of each; a legacy is nobody's."""
    if each.legacy is not None:
        return []
    if each.group is None:
        return [(each.peer, each.tokens)]
    found = [(stake.peer, stake.tokens) for stake in records[each.group.record].stakes if stake.tokens]
    assert sum(num for _, num in found) == each.tokens, f"{each.peer[:8]} was not counted as it asked"
    return found


def legacies(manifests: Iterable[Manifest], branch: BranchId) -> list[Counted]:
    """Return what the manifests of a branch count of other branches; no round of those twice."""
    mine = [each for each in manifests if each.branch == branch]
    found = [each for manifest in mine for each in manifest.contributions if each.legacy is not None]
    stretches = [stretch for each in found if each.legacy for stretch in each.legacy.stretches]
    assert not any(one.overlaps(other) for one, other in combinations(stretches, 2)), "a round was taken in twice"
    return found


def brought(manifest: Manifest) -> list[Stretch]:
    """Return the rounds of other branches that a manifest takes in."""
    return [stretch for each in manifest.contributions if each.legacy for stretch in each.legacy.stretches]


def is_of(stretch: Stretch, place: Place) -> bool:
    branch, round = place
    return stretch.branch == branch and stretch.start <= round < stretch.stop


def is_in(history: History, place: Place) -> bool:
    """Return whether a state holds what a round counted, be it by a legacy."""
    branch, round = place
    return history.has(Stretch(branch=branch, start=round, stop=Round(round + 1)))


def promised(lives: Iterable[Iterable[Event]], kept: History) -> list[Place]:
    """R2, of what one machine's processes said of their branches: return the rounds that it has promised to bring.

    Who makes outer steps of `kept` after others that are not in it has said in between that it left their branch.
    """
    found: list[Place] = []
    for events in lives:
        mine: list[Place] = []  # applied here, and not in what goes on
        tokens = 0
        for event in events:
            match event:
                case RoundCommitted(branch=branch, round=round):
                    if is_in(kept, (branch, round)):
                        assert not mine, f"{mine} were left without a word"
                    else:
                        mine.append((branch, round))
                        tokens += event.tokens
                case BranchLeft():
                    assert 0 <= event.kept <= event.tokens
                    assert (event.kept < event.tokens) == bool(event.reason)
                    assert tokens <= event.tokens, f"{event.tokens} of {tokens} tokens are said to be left"
                    found += mine if event.kept == event.tokens else []
                    mine, tokens = [], 0
                case LegacyDropped(branch=branch):
                    found = [place for place in found if place[0] != branch]
                case _:
                    pass
    return found


def everybody_is_named(commits: Iterable[RoundCommitted], manifests: Mapping[Place, Manifest]) -> None:
    """R3, of what all members have said."""
    for event in commits:
        manifest = manifests[event.branch, event.round]
        before = manifests.get((event.branch, Round(event.round - 1)))
        assert {each.peer for each in manifest.contributions} == set(event.contributors)
        assert manifest.committed_tokens == event.committed_tokens
        if before is not None:
            assert set(before.members) == set(event.contributors) | event.left_out.keys()
        assert all(event.left_out.values())
        assert not event.left_out.keys() & set(event.contributors)


def no_long_wait(times: Iterable[float], longest_s: float) -> None:
    """R4, of a member's commits from some moment on."""
    waits = [after - before for before, after in pairwise(times)]
    assert max(waits, default=0.0) <= longest_s, f"waited {max(waits):.1f} s for a round"
