"""Runs one command of weft, and writes all that its streams send into the file TAP, before it is encrypted.

TAP=sent.bin python tapped.py COMMAND...
"""

import os
from pathlib import Path
from typing import Any

from weft.__main__ import main
from weft.net.transport.tls_stream import TlsStream

SENT = Path(os.environ["TAP"]).open("ab")  # noqa: SIM115  # until the process ends

send = TlsStream.send


async def tapped(self: TlsStream, data: Any) -> None:
    SENT.write(bytes(memoryview(data).cast("B")) if len(data) else b"")
    SENT.flush()
    await send(self, data)


TlsStream.send = tapped  # type: ignore[method-assign]
main()
