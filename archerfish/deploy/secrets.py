"""The secrets of a service on a cluster, which every node derives from the cluster's token.

So none is stored, sent or configured. Whoever has the token may run code on every node anyway.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from archerfish.errors import MachineError

TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
MIN_TOKEN = 16  # characters


def default_token_path() -> Path:
    return Path.home() / ".ray" / "auth_token"


def cluster_token(environ: Mapping[str, str] = os.environ) -> str:
    """The token of the Ray cluster, from where Ray reads it too."""
    text = environ.get(TOKEN, "")
    path = Path(environ.get(TOKEN_PATH) or default_token_path())
    if not text:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            hint = f"Every node needs RAY_AUTH_MODE=token and the same token, in {TOKEN}, or in a file that {TOKEN_PATH} names."
            raise MachineError(f"There is no token of a Ray cluster: {path} does not exist.", hint=hint) from None
        except (OSError, UnicodeDecodeError) as error:
            raise MachineError(f"The token of the Ray cluster in {path} cannot be read: {error}.") from error
    if len(text.strip()) < MIN_TOKEN:
        raise MachineError(f"The token of the Ray cluster has fewer than {MIN_TOKEN} characters.")
    return text.strip()


def has_token(environ: Mapping[str, str] = os.environ) -> bool:
    return bool(environ.get(TOKEN) or environ.get(TOKEN_PATH) or default_token_path().exists())


def make_token() -> None:
    """Write a new token to where Ray looks for one. Only this user can read it."""
    path = default_token_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32), encoding="utf-8")


@dataclass(frozen=True, repr=False)
class ServiceSecrets:
    """What the front ends and the engine hosts of a service know, and nobody else."""

    front_end_pass: str
    routing_secret: str
    public_key: str  # CURVE keys of the front ends: engine hosts let nobody else connect
    secret_key: str

    @classmethod
    def derive(cls, token: str, service: str) -> ServiceSecrets:
        key = blake2b(token.encode()).digest()

        def secret(purpose: str) -> bytes:
            return blake2b(f"archerfish\0{service}\0{purpose}".encode(), key=key, digest_size=32).digest()

        curve = z85.encode(secret("front end key"))
        public = zmq.curve_public(curve)
        return cls(secret("front end pass").hex(), secret("routing").hex(), public.decode(), curve.decode())
