"""Who may ask, and how much: keys with limits of their own, and addresses where there are no keys.

A file of keys is TOML. It holds no key, only what a key is known by:

    [[key]]
    name = "anna"
    salt = "5f0c..."                    # hex
    hash = "91ab..."                    # BLAKE3 of the key, keyed by the salt
    requests_per_minute = 60
    tokens_per_day = 1_000_000

Requests and tokens of a minute are token buckets: they fill steadily, and hold a minute's worth. Tokens are charged as
they are read and drawn, so an answer that is under way is finished, and the next one waits until the debt is paid.

A server reads its file again once it has changed. What was used is counted in memory: a server that starts again counts
anew.
"""

import hmac
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import msgspec
import tomli_w
from blake3 import blake3
from msgspec import Meta

from weft import config
from weft.clock import Clock
from weft.errors import ConfigError
from weft.ids import several
from weft.rng import fresh_secret
from weft.serve.failures import Fault, no_key, no_quota, too_many

MAX_KEYS = 1024  # each is compared with what a first request brings: 2 us each
MINUTE_S, DAY_S = 60.0, 86_400.0
_PREFIX = "sk-weft-"
_Limit = Annotated[int, Meta(ge=1)] | None
_Moment = Annotated[datetime, Meta(tz=True)]
_Salt = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

# How full the queue of a model may be for a request to find a place, by its key's priority (`Wanted.room`).
ROOM = {"low": 0.25, "normal": 0.75, "high": 1.0}


class Key(config.Config, frozen=True, kw_only=True):
    """Somebody who may ask. What is left out has no limit."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.@-]{1,64}$", description="Whose it is; what is refused names it.")]
    salt: Annotated[_Salt, Meta(description="Hex, of this key alone.")]
    hash: Annotated[_Salt, Meta(description="BLAKE3 of the key, keyed by the salt; hex.")]
    requests_per_minute: Annotated[_Limit, Meta(description="Requests that are begun.")] = None
    tokens_per_minute: Annotated[_Limit, Meta(description="Tokens read and drawn.")] = None
    tokens_per_day: Annotated[_Limit, Meta(description="Tokens read and drawn, of 24 hours from the first.")] = None
    concurrent: Annotated[_Limit, Meta(description="Requests under way at a time.")] = None
    models: Annotated[tuple[str, ...], Meta(description="Which may be asked for; empty: all.")] = ()
    priority: Annotated[
        Literal["low", "normal", "high"],
        Meta(description="Low finds no place in a queue that is a quarter full, normal at three quarters."),
    ] = "normal"
    expires: Annotated[_Moment | None, Meta(description="From when on it is refused; a date with time and zone.")] = (
        None
    )


class KeyFile(config.Config, frozen=True, kw_only=True):
    key: tuple[Key, ...] = ()


class Limits(config.Config, frozen=True, kw_only=True):
    """What one server takes."""

    max_body_nbytes: Annotated[int, Meta(ge=1, description="Of a request.")] = 4 << 20
    concurrent_per_address: Annotated[
        int, Meta(ge=1, description="Requests under way from one address of another machine, where there are no keys.")
    ] = 4
    max_wait_s: Annotated[
        float, Meta(gt=0, description="How long nothing may be computed of a request before its first token.")
    ] = 60.0
    max_time_s: Annotated[float, Meta(gt=0, description="How long an answer may take.")] = 600.0
    still_s: Annotated[float, Meta(gt=0, description="After how long without a token a comment is sent.")] = 15.0


def new_key(name: str, **limits: object) -> tuple[str, Key]:
    """Return a new key, which is shown once, and what a file holds of it."""
    secret = _PREFIX + fresh_secret(24).hex()
    salt = fresh_secret(32).hex()
    return secret, msgspec.convert({"name": name, "salt": salt, "hash": _hash(secret, salt), **limits}, Key)


def load_keys(path: Path) -> tuple[Key, ...]:
    """Read a file of keys.

    Raises:
        ConfigError: it cannot be read, two keys have one name, or there are more than `MAX_KEYS`.
    """
    keys = config.load(path, KeyFile).key
    names = [key.name for key in keys]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: two keys are named {twice!r}. Give each its own name.")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{path}: {len(keys)} keys; at most {MAX_KEYS}.")
    return keys


def save_keys(path: Path, keys: Sequence[Key]) -> None:
    """Write a file of keys, which its owner alone may read, whole or not at all."""
    trees = [
        {name: value for name, value in msgspec.structs.asdict(key).items() if value not in (None, ())} for key in keys
    ]
    new = path.with_name(f"{path.name}.new")
    new.touch(mode=0o600)
    new.write_bytes(tomli_w.dumps({"key": trees}).encode())
    new.replace(path)


class KeysOfFile:
    """The keys of a file, which is read again once it has changed. One that cannot be used by then changes nothing.

    Raises:
        ConfigError: it cannot be used; only when this is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = _mark(path)
        self._keys = load_keys(path)

    def now(self) -> tuple[Key, ...]:
        """Return them."""
        if (mark := _mark(self._path)) != self._mark:
            self._mark = mark
            try:
                self._keys = load_keys(self._path)
            except ConfigError as error:
                logging.getLogger("weft.serve").error("%s The keys from before go on being taken.", error)
        return self._keys


Keys = tuple[Key, ...] | KeysOfFile


def _mark(path: Path) -> tuple[int, ...] | None:
    """Return what changes when the file does; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _hash(secret: str, salt: str) -> str:
    return blake3(secret.encode(), key=bytes.fromhex(salt)).hexdigest()


class Bucket:
    """Fills by `most` a minute, and holds so much; it may be in debt."""

    def __init__(self, most: int, now: float) -> None:
        self.most = most
        self._level, self._at = float(most), now

    def level(self, now: float) -> float:
        self._level = min(self.most, self._level + (now - self._at) * self.most / MINUTE_S)
        self._at = now
        return self._level

    def take(self, num: float, now: float) -> None:
        self._level = self.level(now) - num

    def wait_s(self, num: float, now: float) -> float:
        """Return how long until it holds `num`."""
        return max(0.0, (num - self.level(now)) * MINUTE_S / self.most)


@dataclass
class _Account:
    """What somebody has used.

    Args:
        key: as it was when they asked last; another file may have set other limits since.
    """

    key: Key | None = None
    requests: Bucket | None = None
    tokens: Bucket | None = None
    num_running: int = 0
    day_began: float | None = None
    num_today: int = 0


@dataclass(frozen=True)
class Asker:
    """Who asks: a key, or an address.

    Args:
        name: of the key, or the address.
        secret: what pages are shared by: who has another one cannot learn by timing what was asked.
    """

    name: str
    secret: bytes
    key: Key | None = None
    is_local: bool = False

    @property
    def room(self) -> float:
        """See `Wanted.room`."""
        return 1.0 if self.key is None else ROOM[self.key.priority]


class Admission:
    """Lets requests in, and counts what they take.

    Args:
        keys: None: whoever reaches this server may ask.
    """

    def __init__(self, keys: Keys | None, limits: Limits, clock: Clock) -> None:
        self._keys, self._limits, self._clock = keys, limits, clock
        self._accounts: dict[str, _Account] = {}
        self._seen_of: tuple[Key, ...] = ()  # whose secrets were told since
        self._seen: dict[str, Key] = {}  # by a digest of the secret that nobody else can make
        self._salt = fresh_secret(32).hex()

    def asker(self, authorization: str | None, address: str) -> Asker:
        """Return who asks.

        Args:
            authorization: the header.

        Raises:
            Fault: no key, a wrong one, or one that is no longer taken.
        """
        if self._keys is None:
            return Asker(address, address.encode(), is_local=_is_local(address))
        kind, _, secret = (authorization or "").partition(" ")
        secret = secret.strip()
        if kind.lower() != "bearer" or not secret:
            raise no_key("A key is needed: send the header `Authorization: Bearer sk-weft-...`.")
        found = self._found(secret, self._keys.now() if isinstance(self._keys, KeysOfFile) else self._keys)
        if found is None:
            raise no_key("This key is not known here. Ask whoever runs this server for one.")
        if found.expires is not None and found.expires.timestamp() <= self._clock.wall():
            raise no_key(f"This key, {found.name}, is taken no more since {found.expires.date()}.")
        return Asker(found.name, bytes.fromhex(_hash(secret, found.salt)) + secret.encode(), found)

    def _found(self, secret: str, keys: tuple[Key, ...]) -> Key | None:
        """Return whose secret it is. One that was taken before is found at once: who has it learns nothing by that."""
        if keys is not self._seen_of:
            self._seen_of, self._seen = keys, {}
        mark = _hash(secret, self._salt)
        if mark not in self._seen:
            found: Key | None = None
            for key in keys:  # all of them, so that the time tells nothing
                if hmac.compare_digest(_hash(secret, key.salt), key.hash):
                    found = key
            if found is None:
                return None
            self._seen[mark] = found
        return self._seen[mark]

    def check_model(self, asker: Asker, model: str) -> None:
        """Accept `model` for this asker.

        Raises:
            Fault: the key is for other models.
        """
        if asker.key is not None and asker.key.models and model not in asker.key.models:
            message = f"The key {asker.name} is not for {model!r}, but for {', '.join(asker.key.models)}."
            raise Fault(403, message, "permission_error", "model", "model_not_allowed")

    def may_see(self, asker: Asker, model: str) -> bool:
        return asker.key is None or not asker.key.models or model in asker.key.models

    def admit(self, asker: Asker) -> "Visit":
        """Let a request in; it counts as under way until the visit ends.

        Raises:
            Fault: too many at a time, or in this minute, or the day's tokens are spent.
        """
        now = self._clock.now()
        account = self._account(asker, now)
        most = asker.key.concurrent if asker.key is not None else None
        if asker.key is None and not asker.is_local:
            most = self._limits.concurrent_per_address
        headers = self._headers(account, now)
        if most is not None and account.num_running >= most:
            raise too_many(
                f"Limit: {several(most, 'request')} of {asker.name} at a time, under way already.", 1.0, headers
            )
        key = asker.key
        if key is not None and key.tokens_per_day is not None and account.num_today >= key.tokens_per_day:
            left_s = DAY_S - (now - (account.day_began or now))
            message = (
                f"The key {asker.name} may use {several(key.tokens_per_day, 'token')} a day, and has used "
                f"{account.num_today:,}. It may ask again in {ceil(left_s / 3600)} h."
            )
            raise no_quota(message, headers | {"retry-after": str(ceil(left_s))})
        if account.tokens is not None and (wait_s := account.tokens.wait_s(1, now)) > 0:
            raise too_many(
                f"Rate limit: {several(account.tokens.most, 'token')} a minute for {asker.name}.", wait_s, headers
            )
        if account.requests is not None:
            if (wait_s := account.requests.wait_s(1, now)) > 0:
                raise too_many(
                    f"Rate limit: {several(account.requests.most, 'request')} a minute for {asker.name}.",
                    wait_s,
                    headers,
                )
            account.requests.take(1, now)
        account.num_running += 1
        return Visit(self, asker, account)

    def _account(self, asker: Asker, now: float) -> _Account:
        account, key = self._accounts.setdefault(asker.name, _Account()), asker.key
        if key is not None and key != account.key:
            account.key = key
            account.requests = None if key.requests_per_minute is None else Bucket(key.requests_per_minute, now)
            account.tokens = None if key.tokens_per_minute is None else Bucket(key.tokens_per_minute, now)
        if account.day_began is None or now - account.day_began >= DAY_S:
            account.day_began, account.num_today = now, 0
        return account

    def _headers(self, account: _Account, now: float) -> dict[str, str]:
        headers = {}
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.most)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now))))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.most, now):.3f}s"
        return headers


@dataclass
class Visit(AbstractContextManager["Visit"]):
    """A request that was let in, until it is answered."""

    admission: Admission
    asker: Asker
    account: _Account
    _is_over: bool = field(default=False)

    def charge(self, num_tokens: int) -> None:
        """Count tokens that were read or drawn; a debt is paid before the next request."""
        self.account.num_today += num_tokens
        if self.account.tokens is not None:
            self.account.tokens.take(num_tokens, self.admission._clock.now())

    def check(self, num_tokens: int) -> None:
        """Accept a prompt of so many tokens.

        Raises:
            Fault: it has more than a minute's worth, and would never be taken.
        """
        bucket = self.account.tokens
        if bucket is not None and num_tokens > bucket.most:
            message = f"The prompt has {num_tokens} tokens; {self.asker.name} may use {bucket.most} a minute."
            raise too_many(message, None, self.headers)

    @property
    def headers(self) -> Mapping[str, str]:
        return self.admission._headers(self.account, self.admission._clock.now())

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.account.num_running -= 1
            if self.asker.key is None and not self.account.num_running:
                self.admission._accounts.pop(self.asker.name, None)  # addresses are many

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _is_local(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return True  # a socket of this machine
