"""What acts come to: a pure function, the same for whoever computes it, that only the right signatures can move."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charters import charter
from weft.codec.config import Bf16Config, Fp32Config, Int8Config, RandomKConfig
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.keys import Identity
from weft.sync.governance import Void, enact, in_effect, objection
from weft.sync.method.choices import Choices, NesterovConfig, SgdConfig
from weft.sync.method.presets import DdpConfig, spell_out
from weft.sync.method.schedule import ConstantConfig, WsdConfig
from weft.sync.records.acts import MAX_ACTS, Act, Amend, AnyDeed, Ballot, Ban, Pardon, Remove, Succeed, Warrant
from weft.sync.records.ancestry import Fork
from weft.sync.records.charter import MAX_BANNED, AuditTerms, Body, Charter, Expelled, Struck
from weft.sync.records.messages import Accept, AnyRoundMessage, Promise, RoundNote
from weft.wire import Signed, decode, digest_of, encode, seal

RUN = RunId("5e" * 32)
ONE, TWO = Identity.from_seed(bytes([1] * 32)), Identity.from_seed(bytes([2] * 32))
MEMBERS = sorted((Identity.from_seed(bytes([number] * 32)) for number in range(10, 15)), key=lambda each: each.peer)
NAMES = tuple(each.peer for each in MEMBERS)
BODY = Body(RUN, Round(7), NAMES, 40)
FIRST = charter(4, stewards=(ONE.peer, TWO.peer))
NOBODYS = charter(4)


def warrant(deed: AnyDeed, serial: int = 1, who: Identity = ONE, run: RunId = RUN) -> Warrant:
    return Warrant(letters=(seal(who, Act(run=run, serial=serial, deed=deed)),))


def votes(voters: list[Identity], against: PeerId, serial: int = 1) -> Warrant:
    cast = [seal(each, Ballot(run=RUN, peer=against, serial=serial, reason="")) for each in voters]
    return Warrant(letters=tuple(sorted(cast, key=lambda letter: letter.signer)))


def remove(number: int = 0) -> Remove:
    return Remove(peer=NAMES[number], reason="it sends noise")


def why_not(*warrants: Warrant, before: Charter = FIRST) -> str:
    return objection(before, BODY, warrants) or ""


def after(*warrants: Warrant, before: Charter = FIRST) -> Charter:
    return enact(before, BODY, warrants).charter


# --- who may ---


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (warrant(remove(), who=MEMBERS[0]), "not a steward"),
        (warrant(remove(), serial=2), "whose next act is 1"),
        (warrant(remove(), run=RunId("ab" * 32)), "is for run"),
        (Warrant(letters=warrant(remove()).letters * 2), "one signature"),
        (Warrant(letters=(seal(ONE, remove()),)), "expected a signed Act"),
        (warrant(Remove(peer=PeerId("ab" * 32), reason="")), "not a member"),
        (warrant(Pardon(peer=NAMES[0], reason="")), "not banned"),
        (warrant(Succeed(run=RUN, is_at_once=True, reason="")), "cannot succeed itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_void_says_why(made: Warrant, reason: str) -> None:
    assert reason in why_not(made)


def test_who_is_all_members_of_a_run_without_stewards_amends_it_in_the_round_it_names() -> None:
    alone = Body(RUN, Round(7), NAMES[:1], 40)

    def why_not(made: Warrant, before: Charter = NOBODYS, body: Body = alone) -> str:
        return objection(before, body, (made,)) or ""

    amend = Amend(reason="", tokens=5000)
    mine = warrant(amend, who=MEMBERS[0], serial=BODY.round)
    assert enact(NOBODYS, alone, (mine,)).charter.settings.tokens == 5000
    assert "no stewards" in why_not(mine, body=BODY)  # with others it may not
    assert "no stewards" in why_not(warrant(amend, who=MEMBERS[1], serial=BODY.round))
    assert "for one round" in why_not(warrant(amend, who=MEMBERS[0], serial=BODY.round + 1))  # nor twice
    assert "no stewards" in why_not(warrant(remove(), who=MEMBERS[0], serial=BODY.round))  # nor anything else
    fork = Fork(
        branch=BranchId("ab" * 32),
        round=Round(3),
        manifest=Digest("cd" * 32),
        members=NAMES,
        committed_tokens=Tokens(0),
    )
    forked = msgspec.structs.replace(NOBODYS, forks=(fork,))
    assert "no stewards" in why_not(mine, before=forked)  # nor where others were left behind
    assert "not a steward" in why_not(mine, before=FIRST)  # nor where there are stewards


def test_a_run_without_stewards_has_no_acts_but_its_members() -> None:
    assert "no stewards" in why_not(warrant(remove()), before=NOBODYS)
    assert after(votes(MEMBERS[:3], NAMES[4]), before=NOBODYS).expelled == (Expelled(peer=NAMES[4], times=1),)


@given(place=st.integers(min_value=0), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_whoever_alters_a_bit_of_an_act_makes_it_void(place: int, bit: int) -> None:
    (letter,) = warrant(remove()).letters
    for field in ("body", "signature"):
        data = bytearray(getattr(letter, field))
        data[place % len(data)] ^= 1 << bit
        altered = msgspec.structs.replace(letter, **{field: bytes(data)})
        assert why_not(Warrant(letters=(altered,)))


def test_a_letter_beyond_its_bound_is_not_decoded() -> None:
    letter = Signed(kind="Act", body=bytes(1 << 15), signer=ONE.peer, signature=b"")
    assert "more than the" in why_not(Warrant(letters=(letter,)))


def test_an_act_takes_effect_once() -> None:
    once = warrant(Ban(peer=NAMES[0], reason=""))
    assert "decided already" in why_not(once, once)
    assert "decided already" in why_not(once, before=after(once))
    assert why_not(warrant(remove(1)), before=after(once)), "another in its place, too"
    assert not why_not(warrant(remove(1), serial=2), before=after(once))


def test_acts_of_two_stewards_count_for_themselves() -> None:
    both = after(warrant(Ban(peer=NAMES[0], reason="")), warrant(Ban(peer=NAMES[1], reason=""), who=TWO))
    assert both.serials == (1, 1)
    assert both.banned == tuple(sorted(NAMES[:2]))


# --- members ---


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_a_majority_of_the_members_removes_and_nobody_less(voters: list[int], against: int) -> None:
    made = [MEMBERS[number] for number in voters]
    if not made:
        return
    takes_effect = objection(NOBODYS, BODY, (votes(made, NAMES[against]),)) is None
    assert takes_effect == (len(set(voters)) == len(voters) > 2)


def test_ballots_of_others_or_for_others_do_not_count() -> None:
    assert why_not(votes([*MEMBERS[:2], ONE], NAMES[4]))
    mixed = (*votes(MEMBERS[:2], NAMES[4]).letters, *votes(MEMBERS[2:3], NAMES[3]).letters)
    assert "not for one removal" in why_not(Warrant(letters=mixed))
    unsorted = Warrant(letters=votes(MEMBERS[:3], NAMES[4]).letters[::-1])
    assert why_not(unsorted), "one form only"


def test_ballots_for_one_removal_are_none_for_the_next() -> None:
    once = votes(MEMBERS[:3], NAMES[4])
    assert "since these ballots" in why_not(once, before=after(once, before=NOBODYS))
    again = after(votes(MEMBERS[:3], NAMES[4], serial=2), before=after(once, before=NOBODYS))
    assert again.times_expelled(NAMES[4]) == 2


def test_the_last_member_stays() -> None:
    whole = [warrant(remove(number), serial=number + 1) for number in range(5)]
    assert not why_not(*whole[:4])
    assert "no member left" in why_not(*whole)


# --- bans ---


def test_a_ban_removes_a_member_and_outlasts_it_until_a_pardon() -> None:
    banned = enact(FIRST, BODY, (warrant(Ban(peer=NAMES[0], reason="")),))
    assert (banned.removed, banned.charter.banned) == ((NAMES[0],), (NAMES[0],))
    assert "banned already" in why_not(warrant(Ban(peer=NAMES[0], reason=""), serial=2), before=banned.charter)
    pardoned = after(warrant(Pardon(peer=NAMES[0], reason=""), serial=2), before=banned.charter)
    assert pardoned.banned == ()


def test_no_more_keys_are_banned_than_a_charter_holds() -> None:
    full = msgspec.structs.replace(FIRST, banned=tuple(f"{number:064x}" for number in range(MAX_BANNED)))
    assert f"{MAX_BANNED} keys" in why_not(warrant(Ban(peer=NAMES[0], reason="")), before=full)
    assert decode(encode(full), Charter) == full


# --- amendments ---


def amend(**changes: Any) -> Warrant:
    return warrant(Amend(reason="", **changes))


def test_an_amendment_changes_what_it_names_and_nothing_else() -> None:
    before = FIRST.settings
    now = after(amend(every=7, schedule=ConstantConfig(lr=0.5), codec=Bf16Config(), tokens=9)).settings
    method = msgspec.structs.replace(before.method, every=7, codec=Bf16Config())
    assert now == msgspec.structs.replace(before, schedule=ConstantConfig(lr=0.5), method=method, tokens=9)
    assert now.quota == 7


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "these settings already"),
        ({"every": 4}, "these settings already"),
        ({"seq_len": 65}, "more than the 64"),
        ({"batch_size": 1 << 16, "seq_len": 64}, ""),
        ({"apply": NesterovConfig()}, "the outer step is 'sgd'"),
        ({"schedule": ConstantConfig(lr=float("nan"))}, "Expected `float` > 0"),
        ({"apply": SgdConfig(lr=float("inf"))}, "Expected `float` <= 10"),
    ],
    ids=str,
)
def test_settings_that_a_run_cannot_go_on_with_are_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in why_not(amend(**changes))


def test_a_step_is_bounded_in_tokens() -> None:
    wide = msgspec.structs.replace(FIRST, max_seq_len=1 << 20)
    assert "may take at most" in why_not(amend(batch_size=1 << 10, seq_len=1 << 15), before=wide)


def test_bytes_that_are_others_in_each_round_cannot_wait_in_quarantine() -> None:
    method = msgspec.structs.replace(FIRST.settings.method, feedback=0.9, reply_codec=Int8Config())
    before = msgspec.structs.replace(FIRST, settings=msgspec.structs.replace(FIRST.settings, method=method))
    change = amend(codec=RandomKConfig(kept=4, largest=1))
    without = AuditTerms(rate=0.1, trace_every=1)
    waits = msgspec.structs.replace(without, quarantine=3)
    assert "random_k makes others in each" in why_not(change, before=msgspec.structs.replace(before, audits=waits))
    assert not why_not(change, before=msgspec.structs.replace(before, audits=without))


def test_gradients_are_sent_every_step_and_applied_by_the_inner_optimizer() -> None:
    method = spell_out(DdpConfig(), 4)
    ddp = msgspec.structs.replace(FIRST, settings=msgspec.structs.replace(FIRST.settings, method=method))
    assert isinstance(method, Choices)
    assert "gradient" in why_not(amend(every=2), before=ddp)
    assert "'inner'" in why_not(amend(apply=SgdConfig()), before=ddp)
    assert not why_not(amend(codec=Fp32Config(), schedule=ConstantConfig(lr=0.1)), before=ddp)


@given(st.lists(st.tuples(st.integers(8, 64), st.integers(1, 100)), max_size=6))
@settings(max_examples=60, deadline=None)
def test_tokens_leased_are_counted_in_the_length_that_held(lengths: list[tuple[int, int]]) -> None:
    now, cursor, total = FIRST, 0, 0
    for serial, (seq_len, num) in enumerate(lengths, start=1):
        change = (warrant(Amend(reason="", seq_len=seq_len), serial=now.serial_of(ONE.peer) + 1),)
        if seq_len != now.settings.seq_len:
            now = enact(now, Body(RUN, Round(7), NAMES, cursor), change).charter
        cursor, total = cursor + num, total + num * seq_len
        assert now.leased_tokens(cursor) == total, serial


# --- as a whole ---

DEEDS = st.one_of(
    st.builds(lambda number: remove(number), st.integers(0, 4)),
    st.builds(lambda number: Ban(peer=NAMES[number], reason=""), st.integers(0, 4)),
    st.builds(lambda number: Pardon(peer=NAMES[number], reason=""), st.integers(0, 4)),
    st.builds(lambda every: Amend(reason="", every=every), st.integers(1, 4)),
    st.builds(lambda at_once: Succeed(run=RunId("ab" * 32), is_at_once=at_once, reason=""), st.booleans()),
)


@given(st.lists(st.tuples(DEEDS, st.booleans(), st.integers(1, 3)), max_size=6))
@settings(max_examples=80, deadline=None)
def test_what_a_leader_chooses_everybody_accepts_and_it_leaves_a_member(acts: list[tuple[AnyDeed, bool, int]]) -> None:
    waiting = [warrant(deed, serial, ONE if is_one else TWO) for deed, is_one, serial in acts]
    chosen = in_effect(FIRST, BODY, waiting, MAX_ACTS)
    assert len(chosen) <= MAX_ACTS
    enacted = enact(FIRST, BODY, chosen)
    assert len(enacted.removed) < len(NAMES)
    assert sum(enacted.charter.serials) == len(chosen)
    assert list(enacted.charter.banned) == sorted(set(enacted.charter.banned))
    assert decode(encode(enacted.charter), Charter) == enacted.charter
    again = FIRST
    for each in chosen:  # one by one, over so many rounds, what they change is the same
        if objection(again, BODY, (each,)) is None:
            again = enact(again, BODY, (each,)).charter
    assert digest_of(again.settings) == digest_of(enacted.charter.settings)


def test_a_schedule_keeps_its_own_rules() -> None:
    body = encode(Act(run=RUN, serial=1, deed=Amend(reason="", schedule=WsdConfig(decay_tokens=1, total_tokens=9))))
    broken = body.replace(b"\xacdecay_tokens\x01", b"\xacdecay_tokens\x7f")
    assert broken != body
    letter = Signed(kind="Act", body=broken, signer=ONE.peer, signature=ONE.sign(b"weft.signed.v1\x00Act\x00" + broken))
    assert "total_tokens" in why_not(Warrant(letters=(letter,)))


def test_void_is_what_enact_raises() -> None:
    with pytest.raises(Void, match="not a steward"):
        enact(FIRST, BODY, (warrant(remove(), who=MEMBERS[0]),))


# --- a member that lies ---

BRANCH = BranchId("b0" * 32)
LIAR, ACCUSER = MEMBERS[1], MEMBERS[2]


def said(message: AnyRoundMessage, who: Identity = LIAR, round: int = 3) -> Signed:
    return seal(who, RoundNote(branch=BRANCH, round=Round(round), message=message))


def accept(attempt: int, manifest: str, **options: Any) -> Signed:
    return said(Accept(attempt=Attempt(attempt), manifest=Digest(manifest * 64)), **options)


def deny(attempt: int, **options: Any) -> Signed:
    return said(Promise(attempt=Attempt(attempt), accepted=None), **options)


def lie(round: int = 3, who: Identity = LIAR) -> Warrant:
    return Warrant(letters=(accept(1, "a", round=round, who=who), accept(1, "b", round=round, who=who)))


def test_two_notes_that_contradict_each_other_strike_a_key_out_without_anybodys_act() -> None:
    enacted = enact(NOBODYS, BODY, (lie(),))
    assert (enacted.removed, enacted.struck) == ((LIAR.peer,), LIAR.peer)
    assert enacted.charter.banned == (LIAR.peer,)
    assert enacted.charter.struck == (Struck(peer=LIAR.peer, round=Round(7)),)
    assert why_not(lie(), before=enacted.charter) == f"{LIAR.peer[:8]} was banned already for that"


def test_who_is_pardoned_is_struck_out_only_for_another_lie() -> None:
    pardoned = after(lie(), warrant(Pardon(peer=LIAR.peer, reason="its disk was put back")))
    assert pardoned.banned == ()
    assert "banned already" in why_not(lie(), before=pardoned)
    assert "banned already" in why_not(lie(round=7), before=pardoned)
    assert after(lie(round=8), before=pardoned).banned == (LIAR.peer,)


def test_nobody_is_struck_out_for_rounds_to_come_and_so_pardoned_for_them() -> None:
    assert "to which this run has not come" in why_not(lie(round=9))
    assert after(lie(round=8)).struck == (Struck(peer=LIAR.peer, round=Round(8)),)


def test_one_key_is_struck_out_at_a_time() -> None:
    assert why_not(lie(), lie(who=ACCUSER)) == "one round bans one key that lied"
    assert in_effect(FIRST, BODY, (lie(), lie(who=ACCUSER), warrant(remove())), MAX_ACTS) == (lie(), warrant(remove()))


@pytest.mark.parametrize(
    ("letters", "reason"),
    [
        ((accept(1, "a"), accept(1, "a")), "honest member may"),
        ((accept(1, "a"), accept(2, "b")), "honest member may"),
        ((accept(1, "a"), deny(1)), "honest member may"),
        ((accept(1, "a"), accept(1, "b", round=4)), "honest member may"),
        ((accept(1, "a"), accept(1, "b", who=ACCUSER)), "two notes of one member"),
        ((accept(1, "a"),), "two notes of one member"),
        ((accept(1, "a"), accept(1, "b"), accept(1, "c")), "two notes of one member"),
        ((accept(1, "a", who=ONE), accept(1, "b", who=ONE)), "not a member"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_proves_no_lie_strikes_nobody_out(letters: tuple[Signed, ...], reason: str) -> None:
    assert reason in why_not(Warrant(letters=letters))


@given(place=st.integers(min_value=0), bit=st.integers(0, 7), number=st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_whoever_alters_a_bit_of_a_note_proves_nothing(place: int, bit: int, number: int) -> None:
    letters = [*lie().letters]
    for field in ("body", "signature"):
        data = bytearray(getattr(letters[number], field))
        data[place % len(data)] ^= 1 << bit
        altered = [*letters]
        altered[number] = msgspec.structs.replace(letters[number], **{field: bytes(data)})
        assert why_not(Warrant(letters=tuple(altered)))


def test_where_no_more_keys_can_be_banned_a_liar_is_removed() -> None:
    full = msgspec.structs.replace(FIRST, banned=tuple(sorted(f"{number:064x}" for number in range(MAX_BANNED))))
    enacted = enact(full, BODY, (lie(),))
    assert (enacted.removed, enacted.charter) == ((LIAR.peer,), full)
