"""How an engine process is started, and who may reach it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from archerfish.config import EmbedConfig, EngineConfig
from archerfish.errors import InvalidOptionError, did_you_mean, nearest

Kind = Literal["generation", "embedding", "cross-encoder"]


def names_of(name: str, aliases: Iterable[str]) -> list[str]:
    """Under which a request may call for a model: its own name, aliases, and the last part of each."""
    found = [name, *aliases]
    return [*found, *(one.rstrip("/").rsplit("/", 1)[-1] for one in found)]


def hint_for(name: str, listed: Iterable[str]) -> str:
    """For who names none of the models that are listed. Their other names may be paths of this machine, and are not told."""
    own = list(listed)
    last = {one.rsplit("/", 1)[-1]: one for one in own}
    close = nearest(name, [*own, *last])
    return did_you_mean(last.get(close[0], close[0]) if close else name, own)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model to serve: options are those of EngineConfig, or of EmbedConfig for vectors and scores.

    is_beside: there is another of its kind for requests that name no model.
    """

    kind: Kind
    options: dict[str, Any] = {}
    loads: Literal["start", "idle", "demand"] = "start"
    aliases: tuple[str, ...] = ()
    is_beside: bool = False

    @property
    def model(self) -> str:
        usual = EngineConfig.model if self.kind == "generation" else EmbedConfig.model
        return str(self.options.get("model", usual))


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine process is started.

    front_end_pass: what front ends send as credentials, so that they may name tenants, ask for figures and change options.
    public_key, secret_key: the CURVE keys of the process; client_keys: the public keys that may connect, empty for all.
    """

    address: str = ""
    models: tuple[ModelSpec, ...] = ()
    hub: dict[str, Any] = {}
    front_end_pass: str = ""
    public_key: str = ""
    secret_key: str = ""
    client_keys: tuple[str, ...] = ()
    api_keys_file: str = ""  # for clients without the pass, and for the limits of tenants
    admission: dict[str, Any] = {}  # of AdmissionLimits
    latency_budget_ms: float = 50.0  # of a job of embeddings
    max_queue_texts: int = 8192
    max_message_bytes: int = 64 << 20
    memory_gib: float = 0.0  # what loaded models may take together; 0: no limit
    grace_s: float = 30.0  # what running requests get after SIGTERM
    hang_s: float = 120.0  # a job that takes longer hangs, unless its model is new or has needed a quarter of it before
    silence_s: float = 60.0  # and so does a process whose loop has not moved for so long


def check_address(config: HostConfig) -> None:
    """Beyond this machine everything is encrypted, or not sent."""
    scheme, _, rest = config.address.partition("://")
    if scheme not in ("ipc", "tcp", "inproc") or not rest:
        raise InvalidOptionError(f"{config.address!r} is no address.", hint="Write ipc:///a/path or tcp://127.0.0.1:5555.")
    if bool(config.public_key) != bool(config.secret_key):
        raise InvalidOptionError("An engine process needs both of its CURVE keys, or none.")
    if config.client_keys and not config.secret_key:
        raise InvalidOptionError("client_keys are given, but no keys of the engine process.")
    if scheme == "tcp" and not config.secret_key and not is_loopback(rest.rpartition(":")[0]):
        raise InvalidOptionError(
            f"{config.address} can be reached from other machines, but there are no CURVE keys.",
            hint="Give public_key and secret_key (zmq.curve_keypair() makes a pair), or listen on tcp://127.0.0.1.",
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def admit_only(client_keys: tuple[str, ...]) -> ThreadAuthenticator:
    """Answers the sockets of this process who may connect."""
    known = frozenset(client_keys)

    class Keys:
        def callback(self, domain: str, key: bytes) -> bool:
            return key.decode() in known

    guard = ThreadAuthenticator(zmq.Context.instance())
    guard.start()
    guard.configure_curve_callback(domain="archerfish", credentials_provider=Keys())
    return guard
