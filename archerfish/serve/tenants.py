"""API keys, the tenants that they belong to, and what a tenant may do.

A file of keys is TOML; `archerfish keys` (`add_key`) creates and extends it:

    salt = "5f0c..."                    # of this file, 32 bytes in hex

    [[tenant]]
    name = "alice"
    key_hash = "9b1e..."                # hash of the key; the key itself is not stored
    requests_per_minute = 60            # this and all options below are optional
    tokens_per_minute = 100_000
    weight = 2.0
    max_priority = 1
    is_operator = false
    adapters = ["legal", "support"]    # LoRA adapters that it may use; left out: all

    [[tenant]]                          # a second key of the same tenant, to replace the first one gradually
    name = "alice"
    key_hash = "77aa..."

The hash is BLAKE2b keyed with the salt. A key has 256 random bits, which cannot be guessed, so a slow hash is not
needed. A tenant is looked up by the hash of its key; the time that takes says nothing about keys to anyone who does not
know the salt.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from archerfish.errors import CallerError, InvalidOptionError, UnknownOptionError, WriteError, did_you_mean

logger = logging.getLogger("archerfish.serve")
T = TypeVar("T")

KEY_BYTES = SALT_BYTES = DIGEST_BYTES = 32
LEAST_KEY_CHARS = 20  # of keys that people choose themselves
MAX_KEY_CHARS = 512  # longer ones are refused without hashing them
HOW_TO_MAKE_ONE = "`archerfish keys FILE TENANT` makes a key and writes its hash into the file."
ENVIRONMENT = "env:"  # instead of a path: the prefix of the name of an environment variable with keys
RELOAD_INTERVAL_S = 1.0  # how often a changed file is looked for


class UnauthorizedError(CallerError):
    """The key is missing or unknown. The message says nothing about the key."""

    status, code = 401, "invalid_api_key"
    default_hint = "Send a key of this server: Authorization: Bearer <key>."


class ForbiddenError(CallerError):
    """The key is valid and not an operator's."""

    status, code = 403, "not_an_operator"
    default_hint = "Use a key of an operator."


class NotAllowedError(CallerError):
    """Only front ends and operators may do this."""

    status, code = 403, "not_allowed"


Limit = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Hash = Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}\Z")]


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A user of the service and its limits. Holds nothing secret; 0: no limit. A file of keys is checked by these
    types."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A(?!anonymous\Z)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]
    requests_per_minute: Limit = 0.0
    tokens_per_minute: Limit = 0.0
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e12)] = (
        1.0  # its share of the batch, relative to the weights of the others
    )
    max_priority: int = 0  # higher priorities are lowered to this
    is_operator: bool = False  # whether it may use the admin routes
    adapters: tuple[str, ...] | None = None  # LoRA adapters that it may use; None: all

    def may_use(self, adapter: str) -> bool:
        return not adapter or self.adapters is None or adapter in self.adapters

    def require_operator(self) -> None:
        if not self.is_operator:
            raise ForbiddenError(f"The tenant {self.name!r} is not an operator of this server.")


# The only tenant of a server without keys, which listens on loopback. It may do everything.
ANONYMOUS = Tenant(name="anonymous", max_priority=2**31 - 1, is_operator=True)
OPTION_NAMES = ["key_hash", *(spec.name for spec in fields(Tenant))]


class _KeyFile(msgspec.Struct):
    salt: Hash
    tenant: list[dict[str, Any]] = []


class _Key(msgspec.Struct):
    key_hash: Hash


@dataclass(frozen=True, repr=False)
class _KeyTable:
    """The contents of a file of keys."""

    salt: bytes
    by_digest: Mapping[bytes, Tenant]
    by_name: Mapping[str, Tenant]


class Tenants:
    """Finds the tenant of a key. A changed file is read again; while it is faulty, the last good contents stay in
    force."""

    def __init__(
        self, table: _KeyTable | None = None, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._stamp = _stamp(path) if path is not None else None

    @classmethod
    def from_file(cls, path: str | Path, clock: Callable[[], float] = time.monotonic) -> Tenants:
        """The tenants of a file, or for env:NAME of an environment variable, which all processes of the service
        inherit.

        "": no keys, so that every caller is ANONYMOUS.
        """
        if not path:
            return cls()
        variable = str(path).removeprefix(ENVIRONMENT)
        if variable != str(path):
            tenants = cls.from_text(os.environ.get(variable, ""))
            if not tenants.has_keys:
                raise InvalidOptionError(
                    f"The environment variable {variable} holds no API keys.", hint="Set it: name=key ..."
                )
            return tenants
        place = Path(path).expanduser()
        tenants = cls(None, place, clock)  # takes the stamp before the file is read, so that no change is missed
        tenants._table = _read(place)
        return tenants

    @classmethod
    def from_text(cls, text: str) -> Tenants:
        """The tenants of `name=key`, several of them separated by commas or blanks.

        A key without a name belongs to the tenant "default". Tenants have no limits; "operator" may use the admin
        routes.
        """
        salt = hashlib.blake2b(text.encode(), digest_size=SALT_BYTES, person=b"af-environment").digest()
        entries: list[dict[str, Any]] = []
        for number, word in enumerate(re.findall(r"[^,\s]+", text), 1):
            name, mark, key = word.partition("=")
            name, key = (name, key) if mark else ("default", word)
            if len(key) < LEAST_KEY_CHARS:
                message = f"API key {number} has {len(key)} characters; at least {LEAST_KEY_CHARS} are needed."
                raise InvalidOptionError(message, hint=HOW_TO_MAKE_ONE)
            entry: dict[str, Any] = {"name": name, "key_hash": digest_of(key, salt).hex()}
            if name == "operator" and not any(other["name"] == name for other in entries):
                entry["is_operator"] = True
            entries.append(entry)
        return cls(_make_table({"salt": salt.hex(), "tenant": entries}, "the environment")) if entries else cls()

    @property
    def has_keys(self) -> bool:
        return self._table is not None

    def find(self, key: str | None) -> Tenant:
        """The tenant of a key, or UnauthorizedError. On a server without keys: ANONYMOUS for any key."""
        self._reload_if_changed()
        if self._table is None:
            return ANONYMOUS
        if not key:
            raise UnauthorizedError("This server needs an API key, and none was sent.")
        tenant = self._table.by_digest.get(digest_of(key, self._table.salt)) if len(key) <= MAX_KEY_CHARS else None
        if tenant is None:
            raise UnauthorizedError("The API key is not one of this server's.")
        return tenant

    def named(self, name: str) -> Tenant:
        """The tenant of a name, which a trusted process has sent; ANONYMOUS if there is none."""
        self._reload_if_changed()
        return ANONYMOUS if self._table is None else self._table.by_name.get(name, ANONYMOUS)

    def all(self) -> list[Tenant]:
        return [ANONYMOUS] if self._table is None else list(self._table.by_name.values())

    def _reload_if_changed(self) -> None:
        path = self._path
        if path is None or self._clock() - self._looked_at < RELOAD_INTERVAL_S:
            return
        self._looked_at = self._clock()
        before = self._stamp
        self._stamp = _stamp(path)
        if self._stamp == before:
            return
        try:
            self._table = _read(path)
            logger.info("The file of keys %s was read again: %d tenants.", path, len(self.all()))
        except InvalidOptionError as error:
            logger.error("The file of keys has changed and is not used: %s", error)


def bearer_key(authorization: str | None, x_api_key: str | None = None) -> str | None:
    """The key in `Authorization: Bearer <key>` (OpenAI) or `x-api-key: <key>` (Anthropic)."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return (x_api_key or "").strip() or None


def digest_of(key: str, salt: bytes) -> bytes:
    data = key.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=salt, person=b"af-key").digest()


def add_key(path: str | Path, name: str, **limits: Any) -> str:
    """Add a tenant, or another key of one, to a file of keys, which is created if necessary. Returns the key."""
    place = Path(path).expanduser()
    text = _read_text(place) if place.exists() else f'salt = "{secrets.token_hex(SALT_BYTES)}"\n'
    data = _parse(text, str(place))
    key = f"af-{secrets.token_urlsafe(KEY_BYTES)}"  # it is shown once, because only its hash is stored
    salt = _make_table(data, str(place)).salt
    entry = {"name": name, "key_hash": digest_of(key, salt).hex(), **limits}
    _make_table({**data, "tenant": [*data.get("tenant", []), entry]}, str(place))  # so that no faulty file is written
    lines = [f"{option} = {json.dumps(value)}" for option, value in entry.items()]  # JSON's plain values are TOML's
    _write(place, text.rstrip("\n") + "\n\n[[tenant]]\n" + "\n".join(lines) + "\n")
    return key


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise WriteError(f"The file of keys {path} cannot be written: {error.strerror}.") from error


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file changes."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidOptionError(f"The file of keys {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise InvalidOptionError(f"The file of keys {path} is not text in UTF-8.") from None


def _read(path: Path) -> _KeyTable:
    return _make_table(_parse(_read_text(path), str(path)), str(path))


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at [^)]*\)", str(error))
        raise InvalidOptionError(f"The file of keys {where} is not valid TOML {place[0] if place else ''}.") from None


def _check(data: Mapping[str, Any], kind: type[T], known: Collection[str], what: str) -> T:
    """Data of a file as an object. Errors name places and options, and never show values, which may be keys."""
    for option in data:
        if option not in known:  # its name may be a key, if the file was written in another format
            hint = did_you_mean(option, known) if len(option) < LEAST_KEY_CHARS else ""
            raise UnknownOptionError(f"{what} has an unknown option.", hint=hint)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        hint = f"The file holds hashes, and not the keys themselves. {HOW_TO_MAKE_ONE}"
        raise InvalidOptionError(f"{what} is faulty: {error}.", hint=hint) from None


def _make_table(data: Mapping[str, Any], where: str) -> _KeyTable:
    file = _check(data, _KeyFile, ("salt", "tenant"), where)
    tenants: dict[str, Tenant] = {}
    by_digest: dict[bytes, Tenant] = {}
    for number, entry in enumerate(file.tenant, 1):
        what = f"tenant {number} of {where}"
        tenant, key = _check(entry, Tenant, OPTION_NAMES, what), _check(entry, _Key, OPTION_NAMES, what)
        if tenants.setdefault(tenant.name, tenant) is not tenant and len(entry) > 2:
            hint = "Limits stand with the first key of a tenant."
            raise InvalidOptionError(f"{what} has limits, and its name was there before.", hint=hint)
        digest = bytes.fromhex(key.key_hash)
        if digest in by_digest:
            raise InvalidOptionError(f"{what} has the key of another.", hint="Make a new key for each tenant.")
        by_digest[digest] = tenants[tenant.name]
    return _KeyTable(bytes.fromhex(file.salt), by_digest, tenants)


class Callers:
    """Finds the tenant of a message, and whether its sender is a front end or an operator, by the message's
    credentials.

    front_end_pass: front ends send it as credentials. is_private: whether the socket can be reached by front ends only.
    """

    def __init__(self, tenants: Tenants, front_end_pass: str, *, is_private: bool) -> None:
        self.tenants = tenants
        self._pass = front_end_pass.encode()
        self._is_private = is_private and not self._pass

    def is_front_end(self, credentials: str) -> bool:
        return bool(self._pass) and hmac.compare_digest(credentials.encode(errors="surrogatepass"), self._pass)

    def find(self, credentials: str, tenant: str) -> Tenant:
        """The tenant of a request. Requests share cached contexts with requests of the same tenant only."""
        if self.is_front_end(credentials):
            return replace(self.tenants.named(tenant), name=tenant)
        if tenant:
            raise NotAllowedError("Only a front end may name a tenant.", hint="Send an API key as credentials.")
        if self.tenants.has_keys:
            return self.tenants.find(credentials)
        # Without a file of API keys, each key is a tenant of its own, whose name is the hash of the key.
        key = credentials.encode(errors="surrogatepass")
        return replace(ANONYMOUS, name=hashlib.sha256(key).hexdigest()[:32] if key else "")

    def sees_all(self, tenant: Tenant) -> bool:
        """Whether it is a known operator, or without API keys the tenant of those that sent none."""
        is_known = self.tenants.named(tenant.name) is not ANONYMOUS if self.tenants.has_keys else not tenant.name
        return is_known and tenant.is_operator

    def is_operator(self, credentials: str) -> bool:
        """Whether the sender is one. On a private socket without a pass, every peer is."""
        return self._is_private or self.is_front_end(credentials)

    def check_operator(self, credentials: str) -> None:
        """Raise NotAllowedError unless the sender is an operator."""
        if not self.is_operator(credentials):
            raise NotAllowedError("Only front ends and operators may do this.", hint="Send the pass as credentials.")
