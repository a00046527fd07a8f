"""Who asks an engine process, and what it may do there."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace

from archerfish.errors import CallerError
from archerfish.serve.host_config import HostConfig
from archerfish.serve.tenants import ANONYMOUS, Tenant, Tenants


class NotAllowedError(CallerError):
    """Something that only front ends and operators may do."""

    status, code = 403, "not_allowed"


def tenant_of_key(credentials: str) -> str:
    """The tenant that an API key stands for where nobody says otherwise: its hash."""
    return hashlib.sha256(credentials.encode(errors="surrogatepass")).hexdigest()[:32] if credentials else ""


class Callers:
    """Tells front ends, tenants and operators by the credentials of their messages."""

    def __init__(self, config: HostConfig, tenant_of: Callable[[str], str]) -> None:
        self.tenants = Tenants.from_file(config.api_keys_file) if config.api_keys_file else Tenants()
        self._pass = config.front_end_pass.encode()
        self._is_private = not self._pass and config.address.startswith(("ipc:", "inproc:"))
        self._tenant_of = tenant_of

    def is_front_end(self, credentials: str) -> bool:
        return bool(self._pass) and hmac.compare_digest(credentials.encode(errors="surrogatepass"), self._pass)

    def find(self, credentials: str, tenant: str) -> tuple[str, Tenant]:
        """Whose cached contexts a request may share, and what its sender may do."""
        if self.is_front_end(credentials):
            return tenant, self.tenants.named(tenant) or replace(ANONYMOUS, name=tenant)
        if tenant:
            raise NotAllowedError("Only a front end may name a tenant.", hint="Send an API key as credentials.")
        if self.tenants.has_keys:
            caller = self.tenants.find(credentials)
            return caller.name, caller
        own = self._tenant_of(credentials)
        return own, replace(ANONYMOUS, name=own)

    def check_operator(self, credentials: str) -> None:
        """Without a pass, who reaches a private socket is one."""
        if not self._is_private and not self.is_front_end(credentials):
            raise NotAllowedError("Only front ends and operators may do this.", hint="Send the pass as credentials.")
