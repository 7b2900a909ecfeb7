"""What a peer tells of itself: every outer step, the heartbeat that the others show, how it ended.

It decides nothing.
"""

import math

from weft import events
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.peer.companion import Unmeasured
from weft.peer.context import Context, Outcome
from weft.peer.loop.contribution import LeaseTraining
from weft.peer.round.acts import REMOVALS, told, why_removed
from weft.peer.round.driver import AT_WORK, PAUSED, RESTING, Decided
from weft.peer.state.carry import OUTDATED, Carry
from weft.peer.state.mixing import Met
from weft.peer.state.replica import Replica
from weft.store.chunks import replica_digest
from weft.sync.method.graph import spectral_gap
from weft.sync.method.presets import LADDER
from weft.sync.records.messages import Manifest, counted_through, own_work
from weft.sync.records.tuning import Tuned
from weft.wire import digest_of

TORN = "it is exchanged with this peer, and is not here: only the other has moved"


class Report:
    def __init__(self, context: Context, replica: Replica, carry: Carry, training: LeaseTraining) -> None:
        self._run = replica.run
        self._context = context
        self._replica = replica
        self._carry = carry
        self._training = training
        self._traffic_before = (0, 0)
        self._num_in_graph = 0  # members, as was told last
        self.state = "starting"  # one word for people
        self._head: tuple[Manifest | None, Digest | None] = (None, None)  # the last that was named, and its digest

    def enter(self, state: str) -> None:
        """Note what this peer does from now on, in one word for people."""
        self.state = state

    def outcome(self, reason: str, evaluator: Unmeasured) -> Outcome:
        """Return how this peer ended."""
        head, (sent, received) = self._replica.head, self._context.node.moved
        return Outcome(
            reason=reason,
            run=self._run,
            peer=self._context.node.peer,
            round=Round(0) if head is None else head.round,
            committed_tokens=Tokens(0) if head is None else head.committed_tokens,
            replica=replica_digest(self._replica.outer, self._replica.state),
            loss=evaluator.loss,
            nats_per_byte=evaluator.nats_per_byte,
            preferred=evaluator.preferred,
            reward=evaluator.reward,
            evaluated_at=evaluator.evaluated_at,
            sample=evaluator.text,
            sent_nbytes=sent,
            received_nbytes=received,
            checkpoint=self._context.folder.checkpoint,
            successor=self._replica.charter.successor,
        )

    def tell_commit(self, decided: Decided, began: float | None) -> None:
        """Tell of an outer step that was just made, and whether it left this peer out.

        Args:
            began: when this peer began to wait for it, if it did.
        """
        manifest, (sent, received), work = decided.manifest, self._context.node.moved, self._training.work
        mixing = self._carry.mixing
        self._context.emit(
            events.RoundCommitted(
                branch=manifest.branch,
                round=manifest.round,
                attempt=manifest.attempt,
                manifest=digest_of(manifest),
                contributors=tuple(each.peer for each in manifest.contributions),
                left_out=decided.left_out,
                num_through=counted_through(manifest),
                tokens=Tokens(sum(each.tokens for each in manifest.contributions)),
                committed_tokens=manifest.committed_tokens,
                sent_nbytes=sent - self._traffic_before[0],
                received_nbytes=received - self._traffic_before[1],
                duration_s=0.0 if began is None else self._context.clock.now() - began,
                work_s=0.0 if work is None else work.duration_s,
                distance=None if mixing is None or not manifest.has_result else mixing.distance,
                leader=manifest.leader,
                contributed=tuple(each.tokens for each in manifest.contributions),
            )
        )
        self._traffic_before = (sent, received)
        self._tell_legacies(manifest)
        reason = decided.left_out.get(self._context.node.peer)
        if reason not in (None, PAUSED, RESTING, AT_WORK):
            missed = events.RoundMissed(round=manifest.round, carried_tokens=self._carry.tokens, reason=reason)
            self._context.emit(missed)

    def tell_through(self, manifest: Manifest, tokens: Tokens, *, is_counted: bool, was_offered: bool) -> None:
        """Tell what became of what this peer had offered through an aggregator, if it had.

        Args:
            tokens: that were due before the manifest was settled.
        """
        is_its_own = any(each.peer == self._context.node.peer for each in manifest.contributions)
        if is_counted and tokens and not is_its_own:
            self._context.emit(events.CountedThrough(round=manifest.round, tokens=tokens))
        elif was_offered and not is_counted:
            reason = "the peer that hands its updates on was not counted, or did not have its update in time"
            missed = events.RoundMissed(round=manifest.round, carried_tokens=self._carry.tokens, reason=reason)
            self._context.emit(missed)

    def tell_dropped(self, due: Tokens, why: str = OUTDATED) -> None:
        """Tell how much of what was due before a round that did not count it is carried no more."""
        if num := due - self._carry.due:
            self._context.emit(events.WorkDropped(tokens=Tokens(num), reason=why))

    def tell_mixing(self, decided: Decided) -> None:
        """Tell who exchanges with whom, where that has changed, and of what was exchanged and is not here."""
        manifest = decided.manifest
        if manifest.is_gossip:
            is_counted = own_work(manifest, self._context.node.peer) is not None
            for peer in Met(decided.taken).lost if is_counted else ():
                self._context.emit(events.PayloadRejected(round=manifest.round, member=peer, reason=TORN))
        self.tell_graph(manifest)
        if manifest.tuned is not None:
            self._tell_tuned(manifest.round, manifest.tuned)

    def _tell_tuned(self, round: Round, tuned: Tuned) -> None:
        every, codec = LADDER[tuned.rung]
        waited_s, worked_s = tuned.waited_ms / 1000, tuned.worked_ms / 1000
        allowed = f"{100 * self._replica.config.method.tune:g} % are allowed"
        self._context.emit(
            events.MethodTuned(
                round=Round(round + 1),
                every=every,
                codec=str(codec.__struct_config__.tag),
                waited_s=waited_s,
                worked_s=worked_s,
                reason=f"rounds spent {100 * tuned.share:.1f} % of {waited_s + worked_s:.1f} s waiting, {allowed}",
            )
        )

    def tell_graph(self, head: Manifest) -> None:
        """Tell who exchanges with whom after `head`, where that is not as it was."""
        graph, num = self._replica.config.method.graph, len(head.members)
        if graph is not None and num != self._num_in_graph:
            self._num_in_graph, gap = num, spectral_gap(graph.graph, num, graph.degree, self._run.run)
            round = Round(head.round + 1)
            self._context.emit(events.GraphChosen(round=round, graph=graph.graph, num_members=num, spectral_gap=gap))

    def _tell_legacies(self, manifest: Manifest) -> None:
        for each in manifest.contributions:
            if each.legacy is not None:
                self._context.emit(
                    events.LegacyCounted(
                        branch=each.legacy.stretches[0].branch,
                        round=manifest.round,
                        by=each.peer,
                        tokens=Tokens(each.legacy.tokens),
                        weight=each.tokens,
                    )
                )

    def tell_acts(self, manifest: Manifest) -> str | None:
        """Tell of the acts that a manifest holds; return why one of them ends this peer, or None."""
        reason = None
        for event in told(manifest):
            self._context.emit(event)
            is_out = event.subject == self._context.node.peer and event.subject not in manifest.members
            if is_out and event.kind in REMOVALS:
                reason = why_removed(event)
        return reason

    def speeds(self, membership: Membership, head: Manifest) -> dict[PeerId, float]:
        """Return the tokens per second of each member, as far as it tells them."""
        beats = {peer: membership.heartbeat_of(peer) for peer in head.members}
        told = {peer: beat.tokens_per_s for peer, beat in beats.items() if beat is not None}
        told[self._context.node.peer] = self._training.tokens_per_s
        return {peer: speed for peer, speed in told.items() if 0 < speed < math.inf}

    def heartbeat(self) -> Heartbeat:
        """Return what the others are told every two seconds."""
        head, loss = self._replica.head, self._training.loss
        if head is not self._head[0]:
            self._head = head, None if head is None else digest_of(head)
        return Heartbeat(
            name=self._context.node.passport.name,
            branch=BranchId(self._run.run) if head is None else head.branch,
            round=Round(0) if head is None else head.round,
            manifest=self._head[1],
            committed_tokens=0 if head is None else head.committed_tokens,
            state=self.state,
            is_relayed=self._context.node.has_relayed_links,
            loss=None if loss is None or math.isnan(loss) else loss,
            tokens_per_s=self._training.tokens_per_s,
        )
