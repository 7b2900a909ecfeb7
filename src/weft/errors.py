"""Every exception weft raises on purpose.

    WeftError
    ├── ConfigError (ValueError)              2   a file or flag says something weft cannot do
    │   ├── TooLarge (MemoryError)           10   model or batch does not fit this machine
    │   ├── NoSuchRun (LookupError)          17   no run of this home is meant, or several, or none that runs now
    │   └── DataError (ValueError)           11   corpus missing, empty, too small or malformed
    │       └── TokenizerMismatch            12   tokenizer and model or shards disagree
    ├── KeyLocked (RuntimeError)             13   another process uses this identity
    ├── KeyFileError (OSError)               14   identity file missing, unreadable or malformed
    ├── TicketError (ValueError)             15   ticket malformed, truncated or mistyped
    │   └── TicketMismatch                   16   ticket of another version, or of a run not trained where it leads
    ├── NetError (ConnectionError)           20   this machine's side of the network
    │   ├── PortInUse                        21   the address to listen on is taken
    │   ├── Unreachable                      22   nobody on the ticket or in memory answered
    │   └── DialError                        23   one address did not lead to the expected peer
    ├── Refused (PermissionError)            24   the run's members refuse this peer
    │   └── Removed                          31   stewards or a majority of the members removed this peer from the run
    ├── ActVoid (ValueError)                 32   an act or a vote has no effect on the run
    ├── GenesisMismatch (ValueError)         25   the other side trains another run, or this one from other weights
    ├── PeerError (ConnectionError)          26   a remote's fault: bad frame, bad payload, silence, lie
    │   ├── WireError (ValueError)           27   bytes that are no canonical record
    │   ├── PayloadError (ValueError)        28   a payload that breaks its bound or is not finite
    │   ├── DeadlineExceeded (TimeoutError)  29   the peer did not answer in time
    │   └── CallFailed                       30   the peer answered with an error
    ├── CheckpointError (ValueError)         40   checkpoint missing, half-written or tampered with
    ├── DiskFull (OSError)                   41   no room to save; the previous checkpoint is intact
    ├── OutOfMemory (MemoryError)            42   even a micro-batch of one does not fit
    ├── NotFinite (ArithmeticError)          43   loss or gradient became NaN or infinite
    ├── SiteBroken (RuntimeError)            44   the processes of this site have lost each other
    └── PointFailed (RuntimeError)           45   a point of a bench was not played to its end

The number is the process exit code. Success is 0, an unexpected exception is 1.

Every message says what was tried, on what, and what to do next.
"""

from typing import ClassVar


class WeftError(Exception):
    exit_code: ClassVar[int] = 1


class ConfigError(WeftError, ValueError):
    exit_code = 2


class TooLarge(ConfigError, MemoryError):
    exit_code = 10


class NoSuchRun(ConfigError, LookupError):
    exit_code = 17


class DataError(ConfigError):
    exit_code = 11


class TokenizerMismatch(DataError):
    exit_code = 12


class KeyLocked(WeftError, RuntimeError):
    exit_code = 13


class KeyFileError(WeftError, OSError):
    exit_code = 14


class TicketError(WeftError, ValueError):
    exit_code = 15


class TicketMismatch(TicketError):
    exit_code = 16


class NetError(WeftError, ConnectionError):
    exit_code = 20


class PortInUse(NetError):
    exit_code = 21


class Unreachable(NetError):
    exit_code = 22

    def __init__(self, message: str, tried: "tuple[tuple[str, DialError], ...]" = ()) -> None:
        super().__init__(message)
        self.tried = tried  # each address, and what came of it


class DialError(NetError):
    exit_code = 23


class Refused(WeftError, PermissionError):
    exit_code = 24


class Removed(Refused):
    exit_code = 31


class ActVoid(WeftError, ValueError):
    exit_code = 32


class GenesisMismatch(WeftError, ValueError):
    exit_code = 25


class PeerError(WeftError, ConnectionError):
    exit_code = 26


class WireError(PeerError, ValueError):
    exit_code = 27


class PayloadError(PeerError, ValueError):
    exit_code = 28


class DeadlineExceeded(PeerError, TimeoutError):
    exit_code = 29


class CallFailed(PeerError):
    exit_code = 30


class CheckpointError(WeftError, ValueError):
    exit_code = 40


class DiskFull(WeftError, OSError):
    exit_code = 41


class OutOfMemory(WeftError, MemoryError):
    exit_code = 42


class NotFinite(WeftError, ArithmeticError):
    exit_code = 43


class SiteBroken(WeftError, RuntimeError):
    exit_code = 44


class PointFailed(WeftError, RuntimeError):
    exit_code = 45
