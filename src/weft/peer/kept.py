"""What a peer keeps of its run between starts besides state and log: the tickets' secret, a ticket, addresses.

    secret       what this run's tickets hold
    ticket       a fresh one, which `weft ticket` prints
    addresses    where others were last reached: a convenience, since tickets hold addresses too

Secret and ticket are for their owner's eyes only. Each file is replaced whole or stays as it was, so a full disk takes
nothing away.

It does not know networks, nor when there is something new to keep.
"""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from weft.data import write_atomically
from weft.errors import DataError, DiskFull
from weft.ids import PeerId
from weft.net.admission import Admission, ByTicket
from weft.peer.home import PeerFolder


def read_secret(folder: PeerFolder) -> bytes | None:
    path = folder.root / "secret"
    return bytes.fromhex(path.read_text()) if path.exists() else None


def keep_secret(folder: PeerFolder, admission: Admission) -> None:
    """Keep the secret of a run that admits by ticket.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(admission, ByTicket) and admission.secret != read_secret(folder):
        _write_private(folder.root / "secret", admission.secret.hex())


def keep_ticket(folder: PeerFolder, text: str) -> None:
    """Keep a ticket in place of the one before, which stays where this one cannot be written: it is as good."""
    with suppress(OSError):
        _write_private(folder.root / "ticket", text)


def drop_ticket(folder: PeerFolder) -> None:
    """Remove the ticket of a member that takes part no more."""
    with suppress(OSError):
        (folder.root / "ticket").unlink()


def read_addresses(folder: PeerFolder) -> dict[PeerId, tuple[str, ...]]:
    try:
        return msgspec.json.decode(folder.addresses.read_bytes(), type=dict[PeerId, tuple[str, ...]])
    except (OSError, msgspec.DecodeError):
        return {}


def keep_addresses(folder: PeerFolder, known: Mapping[PeerId, tuple[str, ...]]) -> None:
    """Keep addresses in place of those before, which stay where these cannot be written."""
    with suppress(DiskFull, DataError):
        write_atomically(folder.addresses, [msgspec.json.encode(known)])


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")  # nobody else may read it
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
