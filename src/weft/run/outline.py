"""What can be known of a run without torch: an outline of its RunConfig, read from the same bytes.

    outline = read_outline(data, run)        # checked: these are the bytes that the run is named after

An anchor keeps and serves a run whose model it cannot compute.
"""

from collections.abc import Callable
from typing import Annotated, Protocol, assert_never

import msgspec

from weft import wire
from weft.config import Config
from weft.data.store import DataIndex
from weft.errors import ConfigError, DataError, GenesisMismatch
from weft.events import DataReady
from weft.ids import Digest, PeerId, RunId
from weft.net.admission import Admission, Anyone, ByKeys, ByTicket
from weft.net.messages import HexDigest, HexPeer, HexRun
from weft.pipeline.messages import MAX_STAGES
from weft.store.home import Home

Lookup = Callable[[PeerId, Digest], wire.Buffer | None]


class TicketAdmission(Config, frozen=True, kw_only=True, tag_field="admit", tag="ticket"):
    """Whoever holds a ticket; its secret is in no config."""


class KeysAdmission(Config, frozen=True, kw_only=True, tag_field="admit", tag="keys"):
    """The listed keys only."""

    keys: Annotated[tuple[HexPeer, ...], msgspec.Meta(min_length=1)]


class OpenAdmission(Config, frozen=True, kw_only=True, tag_field="admit", tag="open"):
    """Anyone."""


AdmissionConfig = TicketAdmission | KeysAdmission | OpenAdmission


_Count = Annotated[int, msgspec.Meta(ge=1)]


class Training(msgspec.Struct, frozen=True, kw_only=True):
    batch_size: _Count
    seq_len: _Count
    tokens: _Count


class Trusted(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    numerics: str = "fp32"


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """Some fields of a RunConfig, as it has them; what else is in it is not looked at."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w .-]+\Z")]
    initial: HexDigest
    # Of a model that is cut into sections, of each.
    initials: Annotated[tuple[HexDigest, ...], msgspec.Meta(max_length=MAX_STAGES + 1)] = ()
    is_seeded: bool = False
    data: DataIndex | None = None  # None, as of the next two: members train in loops of their own
    is_private: bool = True
    train: Training | None = None
    samples: _Count | None = None  # of those
    batch_size: _Count | None = None
    admission: AdmissionConfig
    stewards: tuple[HexPeer, ...] = ()
    predecessor: HexRun | None = None
    came_with: HexDigest | msgspec.UnsetType = msgspec.UNSET
    base: HexDigest | msgspec.UnsetType = msgspec.UNSET
    bases: Annotated[tuple[HexDigest, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()  # as `initials`
    base_nbytes: _Count | msgspec.UnsetType = msgspec.UNSET
    trust: Trusted | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_audited(self) -> bool:
        """Return whether members do training steps of each other again: of sections they do not."""
        return self.trust is not msgspec.UNSET and self.trust.type == "audited" and not self.initials

    @property
    def total_tokens(self) -> int:
        """Return the committed tokens at which the run is complete; a sample of a loop counts as one."""
        return self.train.tokens if self.train is not None else self.samples or 1

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.seq_len if self.train is not None else self.batch_size or 1


class Named(Protocol):
    """What a run names of data: its RunConfig, or an outline of it."""

    @property
    def initial(self) -> Digest: ...

    @property
    def is_seeded(self) -> bool: ...

    @property
    def data(self) -> DataIndex | None: ...


def read_outline(data: wire.Buffer, run: RunId) -> Outline:
    """Return the outline of the RunConfig whose canonical bytes are `data`.

    Raises:
        GenesisMismatch: these are the bytes of another run.
        ConfigError: they are no RunConfig.
    """
    if wire.digest(data) != Digest(run):
        raise GenesisMismatch(
            f"the config is of run {wire.digest(data)}, the ticket of run {run}. Ask for a fresh ticket."
        )
    try:
        return msgspec.msgpack.decode(data, type=Outline)
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"this run cannot be read: {error}. Ask its maker for another ticket.") from None


def admission_of(admission: AdmissionConfig, stewards: tuple[PeerId, ...], secret: bytes | None) -> Admission:
    """Return whom the run admits.

    Raises:
        ConfigError: by ticket, and the secret is not known.
    """
    match admission:
        case TicketAdmission():
            if secret is None:
                raise ConfigError(
                    "this run admits by ticket, and this ticket holds no secret. Ask a member: weft ticket"
                )
            return ByTicket(secret=secret)
        case KeysAdmission(keys=keys):
            return ByKeys(allowed=(*keys, *stewards))  # those hand in their acts
        case OpenAdmission():
            return Anyone()
        case _:
            assert_never(admission)


def data_ready(index: DataIndex, fetched_nbytes: int) -> DataReady:
    """Tell that the shards of `index`, each counted once, are here."""
    return DataReady(
        num_shards=len({info.digest for info in (*index.train, *index.heldout)}),
        fetched_nbytes=fetched_nbytes,
        train_tokens=index.num_tokens("train"),
        heldout_tokens=index.num_tokens("heldout"),
    )


def named_by(outline: Named, run: RunId) -> tuple[set[Digest], set[Digest]]:
    """Return the blobs, its RunConfig among them, and the shards that a run names."""
    blobs, index = {Digest(run)}, outline.data
    if index is not None:
        blobs.add(index.tokenizer)
    if (came_with := getattr(outline, "came_with", msgspec.UNSET)) is not msgspec.UNSET:
        blobs.add(came_with)
    if (base := getattr(outline, "base", msgspec.UNSET)) is not msgspec.UNSET:
        blobs |= {base, *(getattr(outline, "bases", ()) or ())}
    if not outline.is_seeded:
        blobs |= {outline.initial, *getattr(outline, "initials", ())}
    return blobs, set() if index is None else {info.digest for info in (*index.train, *index.heldout)}


def public(outline: Named, run: RunId, home: Home) -> Lookup:
    """Return what peers of the run may request: its RunConfig and all blobs and shards that it names.

    A digest that the RunConfig does not name is answered with None, whatever lies in `home`; so are files that are
    missing or found corrupt.
    """
    blobs, shards = named_by(outline, run)

    def lookup(peer: PeerId, digest: Digest) -> wire.Buffer | None:  # noqa: ARG001  # whoever was admitted may have them
        try:
            if digest in blobs:
                return home.blobs.open(digest)
            return home.shards.read(digest) if digest in shards else None
        except DataError:
            return None

    return lookup
