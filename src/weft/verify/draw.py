"""Who is to audit a contribution: drawn by the auditor's own signature.

    ticket    Draw(run, branch, round, manifest), signed by an elector once the manifest is decided
    drawn     first 8 bytes of H(signature, work) < rate / (electors - 1), in 2^-64
    link      which steps of it: the next 8 bytes

A manifest names the works that it counts, so what was done is fixed before anybody can sign; and nobody but the auditor
can make its signature, so no worker can foresee who will look, nor at what. Who signs can try other nonces: it may so
draw itself, or draw nobody, and cannot keep another from being drawn. (An Ed25519 signature is no verifiable random
function: one signature never draws for others.)

The ticket shows the worker that who asks was drawn.
"""

from blake3 import blake3

from weft.ids import Digest
from weft.net.messages import HexBranch, HexDigest, HexRun
from weft.wire import Record

_CONTEXT = "weft 2026 audit v1"
_WORD_NBYTES = 8
_WORDS = 1 << 64


class Draw(Record, frozen=True, kw_only=True):
    """What an elector signs of each decided round."""

    run: HexRun
    branch: HexBranch
    round: int
    manifest: HexDigest


def drawn(signature: bytes, work: Digest, rate: float, num_electors: int, num_links: int) -> int | None:
    """Return the number of the link that the signer is to audit; None: it was not drawn.

    Args:
        work: the digest of the signed work.
        rate: the chance that somebody audits it, where it is small: the expected number of auditors.
        num_electors: the worker among them.
        num_links: of the work.
    """
    if num_electors < 2 or not num_links:
        return None
    words = blake3(signature + bytes.fromhex(work), derive_key_context=_CONTEXT).digest(2 * _WORD_NBYTES)
    chance = min(int(rate * _WORDS) // (num_electors - 1), _WORDS)
    if int.from_bytes(words[:_WORD_NBYTES], "little") >= chance:
        return None
    return int.from_bytes(words[_WORD_NBYTES:], "little") % num_links
