"""Runs as `weft.launch.peer` makes them: other machines' files, going on after a stop, and what cannot be done."""

import asyncio
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tickets import signed_ticket
from unit.peer.crew import Crew, Member
from weft.codec.config import Fp32Config
from weft.errors import KeyLocked, NotFinite, Refused, TicketMismatch, TooLarge, Unreachable
from weft.events import ActEnacted, DataReady, Notice, RoundCommitted, StepDone
from weft.ids import RunId
from weft.keys import Identity, open_identity, read_peer
from weft.launch import corpus, peer
from weft.launch.runs import names_in
from weft.launch.terms import Terms, terms
from weft.net.ticket import issue, read
from weft.peer.peer import Peer
from weft.peer.state.checkpoint import Snapshot, load
from weft.run.config import RunConfig
from weft.run.outline import KeysAdmission
from weft.store.home import Home
from weft.sync.method.presets import FedAvgConfig
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records.acts import Act, Amend, AnyDeed, Succeed
from weft.training import device
from weft.wire import seal

# --- data ---


async def test_a_joiner_trains_on_the_founders_files_and_not_on_its_own(tmp_path: Path) -> None:
    """Two machines whose own libraries differ: the run's data are the founder's, byte for byte."""
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await asyncio.wait((a.task, asyncio.ensure_future(a.started.wait())), return_when=asyncio.FIRST_COMPLETED)
        (tmp_path / "text.txt").write_text("another library\n" * 1000)  # what b would pack
        b = crew.join("b")
        await crew.done(a, b)
    (ready,) = b.seen(DataReady)
    shards = {info.digest for info in (*a.peer.run.data.train, *a.peer.run.data.heldout)}
    assert ready.fetched_nbytes == 2 * (ready.train_tokens + ready.heldout_tokens)
    assert {path.name for path in b.home.shards.folder.iterdir()} == shards
    assert all(b.id in event.contributors for event in a.seen(RoundCommitted))


# --- going on ---


async def test_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path) -> None:
    """Stopped in the middle of a round and started again: the same bits as a run that was never stopped."""

    async def alone(name: str, stops_at: int) -> tuple[str, list[str]]:
        folder = tmp_path / name
        folder.mkdir()
        crew, reasons = Crew(folder, num_peers=1, num_rounds=6, train={"schedule": ConstantConfig(lr=1e-2)}), []
        home = Home(folder / "home")

        def prepare(peer: Peer) -> Coroutine[Any, Any, None]:
            async def stop() -> None:
                await crew.members[-1].until(RoundCommitted, lambda event: event.round >= stops_at)
                peer.stop("asked to")

            return stop()

        async with crew.deadline():
            while True:
                member = crew.found("a", home=home, prepare=prepare if stops_at and not reasons else None)
                outcome = await member.task
                assert outcome is not None
                reasons.append(outcome.reason)
                if outcome.reason == "complete":
                    return outcome.replica, reasons

    whole, _ = await alone("whole", 0)
    parts, reasons = await alone("parts", 3)
    assert reasons == ["asked to", "complete"]
    assert parts == whole


@pytest.mark.full
async def test_a_joiner_that_comes_again_brings_its_inner_optimizer(tmp_path: Path) -> None:
    """Its steps are counted on, and its moments are those it left with."""
    crew = Crew(tmp_path, num_peers=2, num_rounds=10_000)
    home = Home(tmp_path / "b")
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        b = crew.join("b", home=home)
        await b.until(RoundCommitted, lambda event: event.round >= 3)
        b.peer.stop("asked to")
        await b.task
        left = load(home.folder(a.peer.run.run, b.id).checkpoint)
        found: dict[str, Tensor] = {}

        def look(peer: Peer) -> None:
            restore = peer._autosave.restore

            def restored(snapshot: Snapshot) -> None:
                restore(snapshot)
                found.update({name: vector.clone() for name, vector in peer._trainer.private_state().items()})

            peer._autosave.restore = restored  # type: ignore[method-assign]

        again = crew.join("b", home=home, prepare=look)
        step = await again.until(StepDone)
        await again.until(RoundCommitted, lambda event: again.id in event.contributors)
    assert again.id == b.id
    assert step.step == left.counters["num_steps"] + 1 > 1
    assert found["moment1"].equal(left.private["moment1"])
    assert found["moment1"].count_nonzero()


@pytest.mark.slow
async def test_a_member_that_comes_back_is_not_asked_again(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2, num_rounds=10_000)
    home, asked = Home(tmp_path / "b"), list[Terms]()

    def agree(terms: Terms) -> bool:
        asked.append(terms)
        return True

    async with crew.deadline():
        crew.found("a", wait_for=2)
        b = crew.join("b", home=home, agree_to=agree)
        await b.until(RoundCommitted, lambda event: b.id in event.contributors)
        b.peer.stop("asked to")
        await b.task
        again = crew.join("b", home=home, agree_to=agree)
        await again.until(RoundCommitted, lambda event: again.id in event.contributors)
        again.peer.stop("asked to")
        await again.task
        shutil.rmtree(next((tmp_path / "b").glob("runs/*/*/checkpoint")))  # as if it had been killed before it saved
        anew = crew.join("b", home=home, agree_to=agree)
        await anew.until(RoundCommitted, lambda event: anew.id in event.contributors)
        said = [each.text for one in (again, anew) for each in one.seen(Notice) if "is a member of run" in each.text]
        c = crew.join("c", agree_to=agree)
        await c.until(RoundCommitted)
    assert len(asked) == 2, "the newcomers, each once"
    assert len(said) == 2
    assert "going on from round " in said[0]
    assert "begins as a newcomer" in said[1]


async def test_a_joiner_that_nobody_answers_goes_on_with_its_checkpoint_and_without_one_says_so(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2, num_rounds=10_000, orphan_after_s=1.0)
    home = Home(tmp_path / "b")
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        b = crew.join("b", home=home)
        await b.until(RoundCommitted, lambda event: event.round >= 2)
        for member in (b, a):
            member.peer.stop("asked to")
            await member.task
        again = crew.join("b", a.ticket, home=home)
        alone = await again.until(RoundCommitted)
        assert alone.contributors == (again.id,)
        (told,) = [each.text for each in again.seen(Notice) if each.text.startswith("joining run")]
        assert "nobody of it answers, and this machine has it at round " in told
        assert " or later: it waits 1 s for the others and then goes on alone; " in told
        with pytest.raises(Unreachable):
            await crew.join("c", a.ticket).task


@pytest.mark.full
async def test_a_ticket_whose_maker_is_gone_leads_back_who_met_others(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=3, num_rounds=10_000)
    home = Home(tmp_path / "c")
    async with crew.deadline():
        a = crew.found("a", wait_for=3)
        b, c = crew.join("b"), crew.join("c", home=home)
        await c.until(RoundCommitted)
        for member in (c, a):
            member.peer.stop("asked to")
            await member.task
        assert {contact.peer for contact in read(a.ticket).contacts} == {a.id}
        again = crew.join("c", a.ticket, home=home)
        await again.until(RoundCommitted, lambda event: again.id in event.contributors)
        for member in (b, again):
            member.peer.stop("asked to")
            await member.task
    assert again.id == c.id


@pytest.mark.slow
async def test_tickets_outlive_the_maker_of_the_run_where_they_name_others(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=4, num_rounds=10_000)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        b = crew.join("b")
        await b.until(RoundCommitted)
        kept = list(a.home.root.glob("runs/*/*/ticket"))
        later = signed_ticket(
            a.peer.context.identity, a.peer.run.run, a.peer.context.node.contacts(), read(a.ticket).secret
        )
        a.peer.stop("asked to")
        await a.task
        assert not kept[0].exists()  # `weft ticket` hands out nothing that leads nowhere
        # One of format 1, made while others were there; one made by another; and the maker's, which names the maker.
        c = crew.join("c", later)
        await c.started.wait()
        await b.until(RoundCommitted, lambda event: c.id in event.contributors)
        d = crew.join("d", b.ticket)
        await d.started.wait()
        await b.until(RoundCommitted, lambda event: d.id in event.contributors)
        assert {contact.peer for contact in read(a.ticket).contacts} == {a.id}
        with pytest.raises(Unreachable, match=rf"^nobody answered\. Tried {a.id[:8]}: "):
            await crew.join("e", a.ticket).task
        for member in (b, c, d):
            member.peer.stop("asked to")
            await member.task


# --- what cannot be done ---


def forged(ticket: str, **change: Any) -> str:
    """Return the ticket, changed and signed by somebody else."""
    given = read(ticket)
    fields = {"run": given.run, "contacts": given.contacts, "secret": given.secret} | change
    return issue(fields["run"], fields["contacts"], fields["secret"])


async def test_a_ticket_of_another_run_is_a_ticket_mismatch(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        with pytest.raises(TicketMismatch, match="run abababab, and the members it leads to do not train that"):
            await crew.join("b", forged(a.ticket, run=RunId("ab" * 32))).task


async def test_a_ticket_with_another_secret_is_refused(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        with pytest.raises(Refused, match="ticket"):
            await crew.join("b", forged(a.ticket, secret=b"another secret!!")).task


async def test_a_key_that_the_run_does_not_list_is_refused(tmp_path: Path) -> None:
    listed = Identity.from_seed(b"k" * 32).peer
    crew = Crew(tmp_path, num_peers=2, admission=KeysAdmission(keys=(listed,)))
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        with pytest.raises(Refused):
            await crew.join("b", a.ticket).task


async def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        a.peer.stop("over")
        await a.task
        with pytest.raises(Unreachable, match="nobody answered"):
            await crew.join("b", a.ticket).task
    assert names_in(Home(tmp_path / "b")) == set(), "a join that failed leaves no run behind"


async def test_a_join_that_is_refused_leaves_nothing_of_the_run_but_what_was_there(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2)
    there = tmp_path / "c"
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        wrong = forged(a.ticket, secret=b"another secret!!")
        kept = there / "runs" / a.peer.run.run / ("ab" * 32) / "log.jsonl"
        kept.parent.mkdir(parents=True)
        kept.write_text("")
        for name in ("b", "c"):
            with pytest.raises(Refused):
                await crew.join(name, wrong).task
        too_small = crew.join("d", a.ticket, max_parameters=1)  # it is let in, and cannot train the run
        with pytest.raises(TooLarge):
            await too_small.task
    assert names_in(Home(tmp_path / "b")) == names_in(Home(tmp_path / "d")) == set()
    assert kept.exists()


async def test_a_join_that_is_stopped_before_its_person_answers_leaves_nothing_of_the_run(tmp_path: Path) -> None:
    crew, asked, is_over = Crew(tmp_path, num_peers=2), threading.Event(), threading.Event()

    def agree(_terms: Terms) -> bool:
        asked.set()
        return is_over.wait()

    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        b = crew.join("b", a.ticket, agree_to=agree)
        await asyncio.to_thread(asked.wait)
        b.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await b.task
        is_over.set()
    assert names_in(Home(tmp_path / "b")) == set()


async def test_a_key_that_was_made_for_a_join_that_failed_is_named(tmp_path: Path) -> None:
    """It stays: whom others refuse tells them whose key it is, so that they let it in."""
    crew, key = Crew(tmp_path, num_peers=2), tmp_path / "keys of mine" / "x.pem"
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        wrong = forged(a.ticket, secret=b"another secret!!")
        with pytest.raises(Refused, match=f"The key {key} was made for this, and stays"):
            await crew.join("b", wrong, key=key).task
        assert key.exists()
        with pytest.raises(Refused) as again:
            await crew.join("b", wrong, key=key).task
        assert "was made" not in str(again.value)


async def test_a_run_goes_on_under_the_identity_that_keeps_it_or_not_at_all(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=1, num_rounds=3)
    async with crew.deadline():
        with open_identity(tmp_path / "a" / "keys" / "peer-0.pem", create=True):  # another run's, at that time
            first = crew.found("a")
            await first.task
        assert read_peer(first.home.keys / "peer-1.pem") == first.id
        again = crew.found("a")
        outcome = await again.task
        assert outcome is not None
        assert (again.id, outcome.round) == (first.id, 3), "peer-0 is free now, but peer-1 keeps the run"
        with open_identity(first.home.keys / "peer-1.pem"), pytest.raises(KeyLocked, match="already"):
            await crew.found("a").task


async def test_a_model_that_does_not_fit_is_refused_before_anybody_is_invited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, num_peers=1)
    num = 32 * 257 * 4  # about the embedding: room for two vectors of it, which is too little to train
    monkeypatch.setattr(device, "host_free_nbytes", lambda: 4 * num)
    async with crew.deadline():
        member = crew.found("a")
        with pytest.raises(TooLarge):
            await member.task
    assert not member.started.is_set()


async def test_a_key_in_use_is_refused_with_the_fix(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2, key=tmp_path / "key.pem")
        await a.started.wait()
        with pytest.raises(KeyLocked, match="--key"):
            await crew.join("b", a.ticket, key=tmp_path / "key.pem").task


async def test_a_loss_that_is_not_finite_ends_the_peer(tmp_path: Path) -> None:
    def prepare(peer: Peer) -> None:
        peer.context.initial.fill_(float("nan"))

    crew = Crew(tmp_path, num_peers=1)
    async with crew.deadline():
        with pytest.raises(NotFinite, match="learning rate"):
            await crew.found("a", prepare=prepare).task


# --- threads ---


def workers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(("train", "serve"))]


async def test_a_peers_threads_end_with_it(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        b = crew.join("b")
        await crew.done(a, b)
        assert not workers()


async def test_a_peer_that_is_cancelled_ends_with_the_step_under_way(tmp_path: Path) -> None:
    every = 20_000
    crew = Crew(tmp_path, num_peers=1, method=FedAvgConfig(every=every, codec=Fp32Config()))
    async with crew.deadline():
        a = crew.found("a")
        await a.until(StepDone)
        a.task.cancel()
        await asyncio.wait([a.task])
        assert a.task.cancelled()
        assert not workers()
        assert len(a.seen(StepDone)) < every


async def test_first_weights_are_made_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_in: list[threading.Thread] = []
    initial = corpus.initial

    def told(*args: Any) -> Any:
        made_in.append(threading.current_thread())
        return initial(*args)

    monkeypatch.setattr(corpus, "initial", told)
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await crew.done(a, crew.join("b"))
    assert len(made_in) == 2
    assert threading.main_thread() not in made_in


# --- a run that goes on as another one: who took part, who comes back, who has an old ticket, learns where ---

STEWARD = Identity.from_seed(bytes([1] * 32))
OLD, NEW = RunId("01" * 32), RunId("5e" * 32)


async def decide(member: Member, deed: AnyDeed) -> None:
    await member.until(RoundCommitted)
    rounds = member.peer.rounds
    assert rounds is not None
    assert rounds.acts.take(seal(STEWARD, Act(run=member.peer.run.run, serial=1, deed=deed))) is None
    await member.until(ActEnacted)


async def test_who_took_part_in_a_run_that_has_ended_reads_where_it_goes_on(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2, num_rounds=10_000, stewards=(STEWARD.peer,))
    home = Home(tmp_path / "b")
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        b = crew.join("b", home=home)
        await decide(a, Succeed(run=NEW, is_at_once=True, reason="", ticket="weft1new"))
        outcomes = await crew.done(a, b)
        assert {outcome.successor.run for outcome in outcomes if outcome.successor} == {NEW}
        with pytest.raises(
            TicketMismatch, match=r"goes on as run 5e5e5e5e\. .* `weft join -` asks for its ticket: weft1new"
        ):
            await crew.join("b", a.ticket, home=home).task
        with pytest.raises(TicketMismatch, match="goes on as run 5e5e5e5e"):
            await crew.found("a", home=a.home).task


async def test_a_member_of_the_successor_answers_an_old_ticket(tmp_path: Path) -> None:
    crew = Crew(tmp_path, num_peers=2, predecessor=OLD)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)
        await a.started.wait()
        assert read(a.ticket).run != OLD
        with pytest.raises(TicketMismatch, match=f"goes on here as run {a.peer.run.run[:8]}"):
            await crew.join("b", forged(a.ticket, run=OLD)).task


@pytest.mark.full
async def test_who_joins_an_amended_run_is_shown_what_it_costs_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path, num_peers=2, num_rounds=10_000, stewards=(STEWARD.peer,))
    asked: list[RunConfig] = []
    monkeypatch.setattr(peer, "terms", lambda run, *rest, **how: asked.append(run) or terms(run, *rest, **how))
    async with crew.deadline():
        a = crew.found("a")
        await decide(a, Amend(reason="", every=7))
        b = crew.join("b")
        await b.until(RoundCommitted, lambda event: b.id in event.contributors)
        assert b.peer.run == a.peer.run, "the genesis is the same"
        assert b.peer.replica.config.method.every == 7
    assert [run.method.every for run in asked] == [7]


@pytest.mark.parametrize("verb", ["found", "join"])
async def test_a_second_peer_of_a_home_in_one_run_is_made_by_its_key_only(tmp_path: Path, verb: str) -> None:
    crew = Crew(tmp_path, num_peers=2)
    async with crew.deadline():
        a = crew.found("a", wait_for=2)  # which has no checkpoint yet
        await a.started.wait()
        again = crew.found("a") if verb == "found" else crew.join("a", a.ticket)
        with pytest.raises(KeyLocked, match="--key"):
            await again.task
        assert [path.name for path in (tmp_path / "a" / "keys").glob("*.pem")] == ["peer-0.pem"]
        b = crew.join("a", a.ticket, key=tmp_path / "second.pem")
        await crew.done(a, b)
