"""How the processes of a service are configured."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from archerfish.config import EmbedConfig, EngineConfig
from archerfish.errors import InvalidOptionError, did_you_mean, nearest
from archerfish.serve.tenants import Tenants

Kind = Literal["generation", "embedding", "cross-encoder"]
GRACE_S = 30.0  # running requests may take this long after SIGTERM


def names_of(name: str, aliases: Iterable[str]) -> list[str]:
    """All names by which a request may ask for a model: its own name, its aliases, and the last part of each."""
    found = [name, *aliases]
    return [*found, *(one.rstrip("/").rsplit("/", 1)[-1] for one in found)]


def hint_for(name: str, listed: Iterable[str]) -> str:
    """A hint for a request with an unknown model name. It shows listed names only: aliases may be paths of this machine."""
    own = list(listed)
    last = {one.rsplit("/", 1)[-1]: one for one in own}
    close = nearest(name, [*own, *last])
    return did_you_mean(last.get(close[0], close[0]) if close else name, own)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model to serve. The options are those of EngineConfig, or of EmbedConfig for embeddings and cross-encoders.

    Requests that name no model mean the first one of their kind.
    """

    kind: Kind
    options: dict[str, Any] = {}
    loads: Literal["start", "idle", "demand"] = "start"
    aliases: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        usual = EngineConfig.model if self.kind == "generation" else EmbedConfig.model
        return str(self.options.get("model", usual))


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an engine process.

    front_end_pass: front ends send it as credentials; with it they may name tenants, read statistics and change options.
    secret_key: the CURVE key of the process, for TCP. client_keys: the public keys that may connect, or empty.
    """

    address: str = ""  # where the front ends connect
    open_address: str = ""  # where other programs connect; empty: nowhere
    models: tuple[ModelSpec, ...] = ()
    hub: dict[str, Any] = {}
    front_end_pass: str = ""
    secret_key: str = ""
    client_keys: tuple[str, ...] = ()
    api_keys_file: str = ""  # API keys and limits of tenants
    admission: dict[str, Any] = {}  # max_wait_s, max_prompt_tokens and max_output_tokens of OverloadController
    latency_budget_ms: float = 50.0  # duration of one job of embeddings
    max_queue_texts: int = 8192
    max_message_bytes: int = 64 << 20
    memory_gib: float = 0.0  # limit for all loaded models together; 0: no limit
    grace_s: float = GRACE_S
    hang_s: float = 120.0  # a longer job counts as hung, unless its model is new or has needed a quarter of that before
    silence_s: float = 60.0  # a process without a heartbeat for so long counts as hung


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a front end. `serve` has the values of ServeConfig."""

    address: str  # of the engine process
    credentials: str
    serve: dict[str, Any] = {}
    retry_after_s: float = 1.0
    listener: int = -1  # file descriptor of the socket from which it accepts connections


def read_tenants(api_keys_file: str) -> Tenants:
    return Tenants.from_file(api_keys_file) if api_keys_file else Tenants()


# Addresses and keys


def check_address(config: HostConfig) -> None:
    """Refuse addresses that other machines can reach without encryption."""
    if config.client_keys and not config.secret_key:
        raise InvalidOptionError("There are CURVE keys of clients, but none of the ZMQ server.")
    for address in (config.address, config.open_address) if config.open_address else (config.address,):
        scheme, _, rest = address.partition("://")
        if scheme not in ("ipc", "tcp", "inproc") or not rest:
            raise InvalidOptionError(f"{address!r} is no address.", hint="Write ipc:///a/path or tcp://127.0.0.1:5555.")
        if scheme == "tcp" and not config.secret_key and not is_loopback(rest.rpartition(":")[0]):
            raise InvalidOptionError(
                f"Other machines can reach {address}, but there are no CURVE keys.",
                hint="Give the ZMQ server keys ([serve] zmq_key_file), or listen on tcp://127.0.0.1.",
            )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
