"""What a peer keeps of its run between starts beside state and log: a secret, a ticket, addresses, a name, its file.

    secret       what this run's tickets hold
    ticket       a fresh one, which `weft ticket` prints
    addresses    where others were last reached: a convenience, since tickets hold addresses too
    ports        where this peer listened last: it does so again, and old tickets lead to it
    name         what --name called this peer last
    said.json    what the run file says of what can be amended, when the run was gone on with last (launch/kept.py)
    run.toml     the run file, of who made the run: what peers share names no text, and this does
    own_data.bin which shards hold this peer's own files, in a private run: nobody else is told

Secret, ticket, run file and own data are for their owner's eyes only. Each file is replaced whole or stays as it was,
so a full disk takes nothing away.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated

import msgspec

from weft import wire
from weft.data.store import PRIVATE, DataIndex, write_atomically
from weft.errors import ConfigError, DataError, DiskFull, WireError
from weft.ids import PeerId
from weft.net.admission import SECRET_NBYTES, Admission, ByTicket
from weft.net.messages import Name
from weft.store.home import Home, PeerFolder

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


def read_secret(folder: PeerFolder) -> bytes | None:
    """Return the secret that this run's tickets hold, or None where none was kept.

    Raises:
        ConfigError: its file is damaged or cannot be read; says what to do.
    """
    path = folder.secret
    try:
        secret = bytes.fromhex(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}, the secret of this run's tickets: {error.strerror or error}. Let the user who trains "
            "read it, then start again."
        ) from error
    except ValueError:
        secret = b""
    if len(secret) < SECRET_NBYTES:
        raise ConfigError(
            f"{path} is damaged: it does not hold the secret of this run's tickets. Join with a ticket of another "
            "member, which brings the secret back: weft join -. If there is no other member, remove the file and "
            "start again: weft makes a new secret, and old tickets let nobody in any more."
        )
    return secret


def keep_secret(folder: PeerFolder, admission: Admission) -> None:
    """Keep the secret of a run that admits by ticket, in place of a damaged one, too.

    Raises:
        DiskFull: no room.
        DataError: the folder cannot be written.
    """
    if not isinstance(admission, ByTicket):
        return
    path, text = folder.secret, admission.secret.hex()
    with suppress(OSError, ValueError):
        if path.read_text() == text:
            return
    write_atomically(path, [text.encode()], mode=PRIVATE)


def keep_ticket(folder: PeerFolder, text: str) -> bool:
    """Keep a ticket in place of the one before, which stays where this one cannot be written; return whether it was."""
    try:
        write_atomically(folder.ticket, [text.encode()], mode=PRIVATE)
    except (DiskFull, DataError):
        return False
    return True


def drop_ticket(folder: PeerFolder) -> None:
    """Remove the ticket of a member that takes part no more."""
    with suppress(OSError):
        folder.ticket.unlink()


def read_addresses(folder: PeerFolder) -> dict[PeerId, tuple[str, ...]]:
    try:
        return msgspec.json.decode(folder.addresses.read_bytes(), type=dict[PeerId, tuple[str, ...]])
    except (OSError, msgspec.DecodeError):
        return {}


def keep_addresses(folder: PeerFolder, known: Mapping[PeerId, tuple[str, ...]]) -> None:
    """Keep addresses in place of those before, which stay where these cannot be written."""
    with suppress(DiskFull, DataError):
        write_atomically(folder.addresses, [msgspec.json.encode(known)])


def read_ports(folder: PeerFolder) -> dict[str, int]:
    """Return on which port each transport listened last; empty: not known."""
    try:
        return msgspec.json.decode(folder.ports.read_bytes(), type=dict[str, _Port])
    except (OSError, msgspec.DecodeError):
        return {}


def keep_ports(folder: PeerFolder, ports: dict[str, int]) -> None:
    """Keep ports beside those of other transports; what was kept stays where these cannot be written."""
    before = read_ports(folder)
    if (now := before | ports) != before:
        with suppress(DiskFull, DataError):
            write_atomically(folder.ports, [msgspec.json.encode(now)])


def read_name(folder: PeerFolder) -> str:
    """Return what this peer was called last; empty: nobody gave it a name, or none that can be one is kept."""
    try:
        return msgspec.convert(folder.name.read_text(encoding="utf-8"), Name)
    except (OSError, ValueError):  # among them what msgspec raises
        return ""


def last_name(home: Home, peer: str) -> str:
    """Return what a peer was called last in any run of a home; empty: nobody gave it a name."""
    named = sorted((path.stat().st_mtime, path) for path in (home.root / "runs").glob(f"*/{peer}/name"))
    return read_name(PeerFolder(named[-1][1].parent)) if named else ""


def keep_name(folder: PeerFolder, name: str) -> None:
    """Keep a name in place of the one before, which stays where this one cannot be written."""
    if name != read_name(folder):
        with suppress(DiskFull, DataError):
            write_atomically(folder.name, [name.encode()])


def keep_run_file(folder: PeerFolder, text: str) -> None:
    """Keep the run file that made the run, in place of the one before, which stays where this cannot be written."""
    with suppress(DiskFull, DataError):
        write_atomically(folder.run_file, [text.encode()], mode=PRIVATE)


def keep_own_data(folder: PeerFolder, index: DataIndex) -> None:
    """Keep which shards hold this peer's own files; what was kept stays where this cannot be written."""
    with suppress(DiskFull, DataError):
        write_atomically(folder.own_data, [wire.encode(index)], mode=PRIVATE)


def read_own_data(folder: PeerFolder) -> DataIndex | None:
    """Return which shards of a home's `private` hold this peer's own files; None: nothing that can be read says so."""
    try:
        found: DataIndex = wire.decode(folder.own_data.read_bytes(), DataIndex, max_nbytes=wire.MAX_RECORD_NBYTES)
    except (OSError, WireError):
        return None
    return found
