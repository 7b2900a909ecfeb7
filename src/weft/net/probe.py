"""Every address of a ticket, tried one by one: does it open, how soon, who answers, and does that one let this peer in.

A probe says hello with a key of its own and no address, so nobody is told of it, and hangs up. It takes no link away
from a peer that runs on this machine.
"""

import asyncio
from collections.abc import Mapping

from msgspec.structs import replace

from weft.clock import Clock
from weft.errors import DialError, GenesisMismatch, PeerError, Refused, WeftError
from weft.keys import Identity
from weft.net.link.dialer import DIAL_S
from weft.net.link.handshake import Passport, greet, handshake_reader
from weft.net.link.trial import Outcome, Trial, failed
from weft.net.messages import PROTOCOL, Contact, Hello
from weft.net.ticket import Ticket
from weft.net.transport.base import Stream, Transport
from weft.rng import fresh_secret

MAX_AT_ONCE = 16


async def probe(
    contact: Contact, address: str, transports: Mapping[str, Transport], passport: Passport, clock: Clock
) -> Trial:
    """Try one address of a member."""
    transport = transports.get(address.partition("://")[0])
    if transport is None:
        said = "this machine has no such transport, or it is switched off"
        return Trial(contact=contact, address=address, outcome="no way", said=said)
    began = clock.now()
    try:
        async with asyncio.timeout(DIAL_S):
            stream = await transport.dial(contact.peer, address, "control")
    except TimeoutError:
        return failed(contact, address, f"no answer within {DIAL_S:g} s")
    except (DialError, PeerError) as error:
        return failed(contact, address, str(error))
    opened_s = clock.now() - began
    outcome, said, name = await _greet(stream, passport)
    # A ticket may name it by the first digits of its key alone.
    contact = replace(contact, peer=stream.peer, name=name or contact.name)
    greeted_s = clock.now() - began - opened_s if outcome == "admitted" else None
    return Trial(contact=contact, address=address, outcome=outcome, said=said, opened_s=opened_s, greeted_s=greeted_s)


async def probe_all(
    ticket: Ticket, identity: Identity, transports: Mapping[str, Transport], clock: Clock
) -> list[Trial]:
    """Try every address on `ticket`, and return what came of each, in their order.

    Args:
        identity: that of `transports`.
    """
    slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(contact: Contact, address: str) -> Trial:
        # Another instance each time: else the second address of a member would look like a duplicate of the first.
        passport = Passport(identity=identity, run=ticket.run, name="doctor", admission=ticket.admission())
        async with slots:
            return await probe(contact, address, transports, passport, clock)

    return list(
        await asyncio.gather(*(one(contact, each) for contact in ticket.contacts for each in contact.addresses))
    )


async def _greet(stream: Stream, passport: Passport) -> tuple[Outcome, str, str]:
    """Return what came of a greeting, what was said of it, and how who let this machine in is called."""
    hello = Hello(
        version=PROTOCOL,
        run=passport.run,
        name=passport.name,
        proof=passport.proof_for(stream.peer),
        addresses=(),
        link=fresh_secret(8),
        instance=passport.instance,
    )
    try:
        welcome = await greet(stream, handshake_reader(stream), hello, passport)
    except Refused as error:
        return "refused", str(error), ""
    except GenesisMismatch as error:
        return "other run", str(error), ""
    except WeftError as error:
        return "no peer", str(error), ""
    finally:
        await stream.close()
    return "admitted", "", "" if welcome is None else welcome.name
