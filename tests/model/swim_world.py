"""Machines of net/membership/swim.py with nothing between them but a heap of messages: time, loss, freezes and lies are
scripted.

A proof is the claim itself, without a signature. A link stands between two machines where either keeps it; bytes on it
arrive in order or, while a path is cut, not at all.
"""

import hashlib
import heapq
from collections import defaultdict

from weft import rng
from weft.ids import PeerId
from weft.net.membership.full_mesh import Gone, Heard, LinkLost, Recovered, Redial, RedialFailed, Tick
from weft.net.membership.members import (
    Accused,
    Departed,
    Lives,
    Members,
    differing,
    everything,
    is_behind,
    listing,
    newer,
    sums,
)
from weft.net.membership.swim import (
    Answer,
    AskHelp,
    Compare,
    Help,
    HelpAsked,
    Helped,
    Keep,
    Linked,
    Ping,
    Pinged,
    Revive,
    SignAccusation,
    SignLife,
    State,
    Tell,
    Tie,
    Tied,
    Told,
    Watch,
    awaited,
    kept,
    next_due,
    step,
)

KINDS = {"life": Lives, "accusation": Accused, "goodbye": Departed}


def life(peer, instance, incarnation):
    return Lives(peer, instance, incarnation, ("life", peer, instance, incarnation))


def accusation(life, accuser):
    fields = (life.peer, life.instance, life.incarnation, accuser)
    return Accused(*fields, ("accusation", *fields))


def read(proof):
    return KINDS[proof[0]](*proof[1:], proof)


class Machine:
    def __init__(self, world, number):
        self.world = world
        self.id = PeerId(hashlib.sha256(f"machine {number}".encode()).hexdigest())
        self.state = State(
            members=Members(me=self.id, instance=b"i" * 8), secret=hashlib.sha256(self.id.encode()).digest()
        )
        self.is_dead = False
        self.thaws_at = 0.0
        self.waiting = []  # messages to a frozen machine
        self.heard_at = {}
        self.log = []

    def feed(self, event):
        before = self.state
        self.state, outputs = step(before, event, self.world.now)
        assert self.state.members.incarnation >= before.members.incarnation
        for peer, entry in before.members.entries.items():
            later = self.state.members.entries.get(peer)
            assert later is None or later.life.incarnation >= entry.life.incarnation
        self.check_links()
        for output in outputs:
            self.act(output)

    def check_links(self):
        """What is chosen from changes alone is what would be chosen among all."""
        state, members = self.state, self.state.members
        if state.is_active and not state.is_unlinked and not state.come:
            assert state.kept == kept(self.id, set(members.entries) - set(members.buried), state.secret)

    def act(self, output):
        world, me = self.world, self.id
        match output:
            case Ping(peer=peer, news=news):
                world.send(me, peer, lambda other: (other.told(me, news), other.feed(Pinged(me))))
            case Answer(peer=peer, news=news) | Tell(peer=peer, news=news):
                world.send(me, peer, lambda other: other.told(me, news))
            case AskHelp(peer=peer, target=target):
                world.send(me, peer, lambda other: other.feed(HelpAsked(me, target)))
            case Help(peer=peer, target=target):
                world.send(me, peer, lambda other: other.feed(Helped(me, target)))
            case SignLife(incarnation=incarnation):
                self.feed(Told(None, (life(me, self.state.members.instance, incarnation),)))
            case SignAccusation(life=accused):
                self.feed(Told(None, (accusation(accused, me),)))
            case Compare(peer=peer):
                mine = sums(self.state.members)
                world.send(me, peer, lambda other: other.compared(me, mine))
            case Keep(peers=peers):
                for peer in peers:
                    world.dial(self, peer)
                for other in list(self.state.links):
                    world.send(me, other, lambda there, kept=other in peers: there.feed(Tied(me, Tie(False, kept))))
            case Revive(peer=peer):
                if peer is not None:
                    world.dial(self, peer)
            case Redial(peer=peer):
                world.dial(self, peer, is_answered=True)
            case _:
                self.log.append((world.now, output))
                if isinstance(output, Gone):  # as net/membership/membership.py does
                    world.at(world.now, lambda: world.hang_up(self, world.by_id[output.peer]))

    def told(self, sender, news, is_compared=False):
        self.feed(Told(sender, tuple(read(proof) for proof in news), is_compared))

    def compared(self, sender, theirs):
        empty, others = differing(self.state.members, theirs)
        lacking = everything(self.state.members, empty)
        self.world.send(self.id, sender, lambda other: other.told(self.id, lacking, True))
        buckets, listed = listing(self.state.members, others)
        self.world.send(self.id, sender, lambda other: other.listed(self.id, buckets, listed, False))

    def listed(self, sender, buckets, listed, is_answer):
        later = newer(self.state.members, buckets, listed)
        self.world.send(self.id, sender, lambda other: other.told(self.id, later, True))
        if not is_answer and is_behind(self.state.members, listed):
            mine = listing(self.state.members, buckets)
            self.world.send(self.id, sender, lambda other: other.listed(self.id, *mine, True))

    def tick(self):
        if self.is_dead:
            return
        if self.thaws_at > self.world.now:
            self.world.at(self.thaws_at, self.tick)
            return
        for peer in awaited(self.state):
            if peer in self.heard_at:
                self.feed(Heard(peer, self.heard_at[peer]))
        self.feed(Tick())
        self.world.at(max(next_due(self.state, self.world.now), self.world.now + 0.001), self.tick)

    def present(self):
        return {peer for peer, entry in self.state.members.entries.items() if entry.status == "alive"}


class World:
    def __init__(self, num, seed):
        self.now = 0.0
        self.luck = rng.stream(seed, "swim")
        self.queue = []
        self.number = 0
        self.cut = set()  # pairs
        self.loss = 0.0  # of whole messages: worse than a stream does
        self.arrives = defaultdict(float)
        self.machines = [Machine(self, number) for number in range(num)]
        self.by_id = {machine.id: machine for machine in self.machines}
        for machine in self.machines:
            machine.feed(Told(None, (life(machine.id, b"i" * 8, 0),)))
            machine.feed(Told(None, tuple(life(other.id, b"i" * 8, 0) for other in self.machines if other != machine)))
            machine.feed(Watch(True))
            self.at(float(self.luck.random()), machine.tick)

    def at(self, when, what):
        self.number += 1
        heapq.heappush(self.queue, (when, self.number, what))

    def until(self, end):
        while self.queue and self.queue[0][0] <= end:
            self.now, _, what = heapq.heappop(self.queue)
            what()
        self.now = end

    def is_open(self, a, b):
        return frozenset((a, b)) not in self.cut

    def send(self, source, target, what):
        sender, receiver = self.by_id[source], self.by_id[target]
        if target not in sender.state.links or sender.is_dead or receiver.is_dead or not self.is_open(source, target):
            return
        if self.luck.random() < self.loss:
            return
        due = max(self.arrives[source, target], self.now + 0.02 + 0.3 * float(self.luck.random()))
        self.arrives[source, target] = due

        def arrive():
            if receiver.is_dead:
                return
            if receiver.thaws_at > self.now:
                self.at(receiver.thaws_at + 0.01, arrive)
                return
            receiver.heard_at[source] = self.now
            what(receiver)

        self.at(due, arrive)

    def dial(self, machine, target, is_answered=False):
        other = self.by_id[target]

        def ended():
            if machine.is_dead:
                return
            if other.is_dead or other.thaws_at > self.now or not self.is_open(machine.id, target):
                if is_answered:
                    machine.feed(RedialFailed(target, "no answer"))
                return
            for one, another in ((machine, other), (other, machine)):
                one.heard_at[another.id] = self.now
                if another.id not in one.state.links:
                    one.feed(Linked(another.id))
                one.feed(Tied(another.id, Tie(False, one.id in another.state.kept)))

        self.at(self.now + 0.1, ended)

    def kill(self, machine):
        machine.is_dead = True
        for other in self.machines:
            if machine.id in other.state.links and not other.is_dead:
                other.feed(LinkLost(machine.id, "reset"))

    def hang_up(self, *ends):
        for one, other in (ends, ends[::-1]):
            if other.id in one.state.links and not one.is_dead:
                one.feed(LinkLost(other.id, "dropped"))

    def reset(self, a, b):
        self.hang_up(a, b)
        for one, other in ((a, b), (b, a)):
            if other.id in one.state.kept:
                self.dial(one, other.id)

    def lie(self, liar, target):
        """Let `liar` accuse `target` of being out of reach, at the incarnation that it knows."""
        entry = liar.state.members.entries.get(target.id)
        if entry is not None:
            liar.feed(Told(liar.id, (accusation(entry.life, liar.id),)))

    def removals(self):
        """Return who declared whom gone who lived."""
        living = {machine.id for machine in self.machines if not machine.is_dead}
        return [
            (at, machine.id, output.peer)
            for machine in self.machines
            for at, output in machine.log
            if isinstance(output, Gone) and output.peer in living
        ]

    def recoveries(self):
        return sum(isinstance(output, Recovered) for machine in self.machines for _, output in machine.log)
