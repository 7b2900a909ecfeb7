"""One peer of `benchmarks.paths`: a node in a namespace of its own, told what to do by lines of JSON.

    python _paths_peer.py '{"seed": 1, "transports": ["tls", "iroh", "via"], "known": {"<key>": ["tls://..."]}, ...}'

It keeps a link to whomever it hears of and says so: {"event": "up", "peer": ..., "transport": ..., "at": seconds}. A
line {"fetch": key} on its input makes it fetch a blob from that peer: {"event": "fetched", "seconds": ...}.
"""

import asyncio
import json
import sys
import time
from typing import Any

from weft.clock import SystemClock
from weft.errors import WeftError
from weft.events import Event, LinkDown, LinkUp
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.blobs import striped
from weft.net.blobs.relay import RelayConfig
from weft.net.link.handshake import Passport
from weft.net.messages import Contact
from weft.net.node import Node
from weft.net.speed_test import SpeedTest
from weft.net.transport.base import Transport
from weft.net.transport.iroh import IrohConfig, IrohTransport
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.wire import digest

RUN = RunId("ab" * 32)


def say(**words: Any) -> None:
    print(json.dumps({**words, "at": time.time()}), flush=True)


def tell(event: Event) -> None:
    if isinstance(event, LinkUp):
        say(event="up", peer=event.remote, transport=event.transport, address=event.address, tried=list(event.tried))
    elif isinstance(event, LinkDown):
        say(event="down", peer=event.remote, reason=event.reason)


def node_of(options: dict[str, Any]) -> Node:
    identity = Identity.from_seed(bytes([options["seed"]]) * 32)
    ways = options["transports"]
    proxy = {"proxy": options["proxy"]} if options.get("proxy") else {}
    made: dict[str, Transport] = {
        "tls": TlsTransport(identity, TlsConfig(port=options.get("port", 0), **proxy)),
        "iroh": IrohTransport(identity, IrohConfig(port=options.get("port", 0))),
    }
    passport = Passport(identity=identity, run=RUN, name=options["name"], admission=Anyone())
    via = identity if "via" in ways else None
    direct = [made[way] for way in ways if way != "via"]
    relay = RelayConfig(**options.get("relay", {}))
    return Node(passport, direct, SystemClock(), tell, relay=relay, via=via)


async def main(options: dict[str, Any]) -> None:
    striped.MAX_STREAMS = options.get("num_streams", striped.MAX_STREAMS)
    node = node_of(options)
    SpeedTest(node, SystemClock())  # what `weft doctor` asks
    blob = bytes(options["nbytes"])
    name = digest(blob)
    node.serve_blobs(lambda _peer, wanted: blob if wanted == name else None)

    def heard(contact: Contact) -> None:
        say(event="heard", peer=contact.peer)
        node.keep(contact.peer)

    async with node:
        say(event="started", addresses=node.addresses)
        node.on_contact(heard)
        for peer, addresses in options["known"].items():
            node.remember(PeerId(peer), addresses)
            node.keep(PeerId(peer))
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            began = time.perf_counter()
            try:
                await node.fetch_any([PeerId(order["fetch"])], name, len(blob))
                say(event="fetched", seconds=time.perf_counter() - began)
            except WeftError as error:
                say(event="failed", reason=str(error))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
