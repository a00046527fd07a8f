"""API keys and the tenants that they stand for.

A file of keys is TOML, made and extended by `archerfish keys`, which is `add_key`:

    salt = "5f0c..."                    # of this file, 32 bytes in hex

    [[tenant]]
    name = "alice"
    key_hash = "9b1e..."                # of the key, which stands nowhere
    requests_per_minute = 60            # this and all that follow may be left out
    tokens_per_minute = 100_000
    weight = 2.0
    max_priority = 1
    is_operator = false

    [[tenant]]                          # a second key of the same tenant, for the days in which the first is replaced
    name = "alice"
    key_hash = "77aa..."

Keys are kept as BLAKE2b under the file's salt: a key has 256 random bits, which no guessing reaches, so that a slow hash would
only slow down requests. A key is found by its hash: how long that takes depends on the hash, which nobody without the salt can
steer, and the hash found is compared in constant time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from archerfish.errors import CallerError, InvalidOptionError, UnknownOptionError, WriteError, did_you_mean

logger = logging.getLogger("archerfish.serve")

KEY_PREFIX = "af-"
KEY_BYTES = SALT_BYTES = DIGEST_BYTES = 32
LEAST_KEY_CHARS = 20  # of keys that people bring themselves
MAX_KEY_CHARS = 512  # what is longer is not worth hashing
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
HOW_TO_MAKE_ONE = "`archerfish keys FILE TENANT` makes a key and writes its hash into the file."
ENVIRONMENT = "env:"  # and the name of a variable with keys, where else the path of a file stands
RELOAD_INTERVAL_S = 1.0  # how often the file is looked at


class UnauthorizedError(CallerError):
    """No key, or one that nobody has. Says nothing about the key."""

    status, code = 401, "invalid_api_key"
    default_hint = "Send a key of this server: Authorization: Bearer <key>."


class ForbiddenError(CallerError):
    """A good key that is not enough for this."""

    status, code = 403, "not_an_operator"
    default_hint = "Use a key of an operator."


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Who asks, and what it may do. Holds nothing secret; 0 stands for no limit."""

    name: str
    namespace: str  # of its cached contexts and results; no other tenant has it
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    weight: float = 1.0  # its share of the batch, against the weights of the others
    max_priority: int = 0  # priorities above are lowered to this
    is_operator: bool = False  # whether it may use the admin routes

    def capped(self, priority: int) -> int:
        return min(priority, self.max_priority)

    def require_operator(self) -> None:
        if not self.is_operator:
            raise ForbiddenError(f"The tenant {self.name!r} is not an operator of this server.")


# Without keys there is one tenant, which may do everything: for servers that listen on loopback.
ANONYMOUS = Tenant(name="anonymous", namespace="", max_priority=2**31 - 1, is_operator=True)
LIMIT_NAMES = [spec.name for spec in fields(Tenant) if spec.name not in ("name", "namespace")]


@dataclass(frozen=True)
class _Book:
    """What one reading of the file gave."""

    salt: bytes
    by_digest: Mapping[bytes, tuple[bytes, Tenant]]  # the digest once more, to compare
    by_name: Mapping[str, Tenant]

    def __repr__(self) -> str:
        return f"_Book({len(self.by_digest)} keys)"

    def find(self, key: str) -> Tenant | None:
        digest = digest_of(key, self.salt)
        kept, tenant = self.by_digest.get(digest, (b"", None))
        return tenant if hmac.compare_digest(kept, digest) else None


class Tenants:
    """Finds the tenant of a key. A file is read again when it has changed; while it is faulty, what was read before holds."""

    def __init__(
        self, book: _Book | None = None, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._book = book
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._stamp = _stamp(path) if path is not None else None
        self.error: str | None = None  # why the file could not be read again

    @classmethod
    def from_file(cls, path: str | Path, clock: Callable[[], float] = time.monotonic) -> Tenants:
        """Of a file; or, for env:NAME, of keys that an environment variable holds, which every process of ours inherits."""
        variable = str(path).removeprefix(ENVIRONMENT)
        if variable != str(path):
            tenants = cls.from_text(os.environ.get(variable, ""))
            if not tenants.has_keys:
                raise InvalidOptionError(f"The environment variable {variable} holds no API keys.", hint="Set it: name=key ...")
            return tenants
        place = Path(path).expanduser()
        tenants = cls(None, place, clock)  # the stamp first: a change while the file is read is seen later
        tenants._book = _read(place)
        return tenants

    @classmethod
    def from_text(cls, text: str) -> Tenants:
        """Keys as an environment variable holds them: `name=key`, several of them with commas or blanks between.

        A bare key is that of a tenant "default". None has limits; one named "operator" may use the admin routes.
        """
        salt = hashlib.blake2b(text.encode(), digest_size=SALT_BYTES, person=b"af-environment").digest()
        entries: list[dict[str, Any]] = []
        for index, word in enumerate(re.findall(r"[^,\s]+", text)):
            name, mark, key = word.partition("=")
            name, key = (name, key) if mark else ("default", word)
            if len(key) < LEAST_KEY_CHARS:
                raise InvalidOptionError(
                    f"API key {index + 1} has {len(key)} characters; at least {LEAST_KEY_CHARS} are needed.",
                    hint=HOW_TO_MAKE_ONE,
                )
            entry: dict[str, Any] = {"name": name, "key_hash": digest_of(key, salt).hex()}
            if name == "operator" and not any(other["name"] == name for other in entries):
                entry["is_operator"] = True
            entries.append(entry)
        return cls(_book_of(salt, entries, "the environment")) if entries else cls()

    @property
    def has_keys(self) -> bool:
        return self._book is not None

    def find(self, key: str | None) -> Tenant:
        """The tenant of a key; UnauthorizedError where there is none. Without keys configured: ANONYMOUS, whatever is sent."""
        self._look()
        if self._book is None:
            return ANONYMOUS
        if not key:
            raise UnauthorizedError("This server wants an API key, and none was sent.")
        tenant = self._book.find(key) if len(key) <= MAX_KEY_CHARS else None
        if tenant is None:
            raise UnauthorizedError("The API key is not one of this server's.")
        return tenant

    def named(self, name: str) -> Tenant | None:
        """For processes that trust whoever names a tenant."""
        self._look()
        if self._book is None:
            return ANONYMOUS if name in ("", ANONYMOUS.name) else None
        return self._book.by_name.get(name)

    def all(self) -> list[Tenant]:
        if self._book is None:
            return [ANONYMOUS]
        return list(self._book.by_name.values())

    def reload(self) -> None:
        """Read the file again; raises where it is faulty, and nothing changes then."""
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._book = _read(self._path)
            self.error = None

    def _look(self) -> None:
        if self._path is None or self._clock() - self._looked_at < RELOAD_INTERVAL_S:
            return
        self._looked_at = self._clock()
        if _stamp(self._path) == self._stamp:
            return
        try:
            self.reload()
            logger.info("The file of keys %s was read again: %d tenants.", self._path, len(self.all()))
        except InvalidOptionError as error:
            self.error = str(error)
            logger.error("The file of keys has changed and is not used: %s", error)

    def __repr__(self) -> str:
        return f"Tenants({[tenant.name for tenant in self.all()]})"


def bearer_key(authorization: str | None, x_api_key: str | None = None) -> str | None:
    """The key in `Authorization: Bearer <key>` (OpenAI) or `x-api-key: <key>` (Anthropic)."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return (x_api_key or "").strip() or None


def digest_of(key: str, salt: bytes) -> bytes:
    data = key.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=salt, person=b"af-key").digest()


def namespace_of(name: str, salt: bytes) -> str:
    """A tenant's own, the same in every process that reads the same keys; tells neither key nor name."""
    return hashlib.blake2b(name.encode(), digest_size=16, key=salt, person=b"af-namespace").hexdigest()


def new_key() -> str:
    """A key that nobody can guess. It is to be shown once: only its hash is kept."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def add_key(path: str | Path, name: str, **limits: Any) -> str:
    """Add a tenant, or another key of one, to a file of keys, which is made if need be. Returns the key, to be shown once."""
    place = Path(path).expanduser()
    text = _text_of(place) if place.exists() else f'salt = "{secrets.token_hex(SALT_BYTES)}"\n'
    salt, entries = _parse(text, str(place))
    key = new_key()
    entry = {"name": name, "key_hash": digest_of(key, salt).hex(), **limits}
    _book_of(salt, [*entries, entry], str(place))  # so that no faulty file is written
    lines = [f"{option} = {_toml(value)}" for option, value in entry.items()]
    _write(place, text.rstrip("\n") + "\n\n[[tenant]]\n" + "\n".join(lines) + "\n")
    return key


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


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
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidOptionError(f"The file of keys {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise InvalidOptionError(f"The file of keys {path} is not text in UTF-8.") from None


def _read(path: Path) -> _Book:
    salt, entries = _parse(_text_of(path), str(path))
    return _book_of(salt, entries, str(path))


def _parse(text: str, where: str) -> tuple[bytes, list[dict[str, Any]]]:
    """Salt and entries of a file. Errors name places and options and never what stands there: it might be a key."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at [^)]*\)", str(error))
        raise InvalidOptionError(f"The file of keys {where} is not valid TOML {place[0] if place else ''}.") from None
    for name in data:
        if name not in ("salt", "tenant"):
            raise UnknownOptionError(f"{where} has a key that is not known.", hint="It takes salt and [[tenant]] tables.")
    salt = _hex(data.get("salt"), SALT_BYTES, f"salt of {where}")
    entries = data.get("tenant", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidOptionError(f"Tenants of {where} must be tables: [[tenant]].")
    return salt, entries


def _hex(value: object, num_bytes: int, what: str) -> bytes:
    if isinstance(value, str) and re.fullmatch(rf"[0-9a-fA-F]{{{2 * num_bytes}}}", value):
        return bytes.fromhex(value)
    raise InvalidOptionError(
        f"The {what} must be {num_bytes} bytes in hex.", hint=f"Keys themselves do not stand in the file. {HOW_TO_MAKE_ONE}"
    )


def _book_of(salt: bytes, entries: Iterable[Mapping[str, Any]], where: str) -> _Book:
    tenants: dict[str, Tenant] = {}
    by_digest: dict[bytes, tuple[bytes, Tenant]] = {}
    for index, entry in enumerate(entries):
        what = f"tenant {index + 1} of {where}"
        name = entry.get("name")
        if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or name == ANONYMOUS.name:
            raise InvalidOptionError(
                f"The name of {what} is missing or not allowed.",
                hint=f"Letters, digits and ._@-, at most 64 of them, but not {ANONYMOUS.name!r}.",
            )
        limits = {option: value for option, value in entry.items() if option not in ("name", "key_hash")}
        if name not in tenants:
            tenants[name] = _tenant(name, namespace_of(name, salt), limits, what)
        elif limits:
            raise InvalidOptionError(
                f"{what} has a name that was there before, and limits.", hint="Limits stand with the first key of a tenant."
            )
        digest = _hex(entry.get("key_hash"), DIGEST_BYTES, f"key_hash of {what}")
        if digest in by_digest:
            raise InvalidOptionError(f"{what} has the key of another.", hint="Make a new key for each tenant.")
        by_digest[digest] = digest, tenants[name]
    return _Book(salt, by_digest, tenants)


def _tenant(name: str, namespace: str, limits: Mapping[str, Any], what: str) -> Tenant:
    tenant = Tenant(name=name, namespace=namespace)
    values: dict[str, Any] = {}
    for option, value in limits.items():
        if option not in LIMIT_NAMES:  # the name of an option may be a key too, where somebody mistook the format
            hint = did_you_mean(option, LIMIT_NAMES) if len(option) < LEAST_KEY_CHARS else ""
            raise UnknownOptionError(f"{what} has an option that is not known.", hint=hint)
        kind = type(getattr(tenant, option))
        is_number = kind is float and isinstance(value, int | float) and not isinstance(value, bool)
        if type(value) is not kind and not is_number:
            raise InvalidOptionError(f"{option} of {what} must be {kind.__name__}, not {type(value).__name__}.")
        values[option] = float(value) if is_number else value
    tenant = replace(tenant, **values)
    for option in ("requests_per_minute", "tokens_per_minute", "weight"):
        number = getattr(tenant, option)
        if not math.isfinite(number) or number < 0 or (option == "weight" and number == 0):
            least = "above 0" if option == "weight" else "at least 0"
            raise InvalidOptionError(f"{option} of {what} must be a number {least}, not {number:g}.")
    return tenant
