"""What a front end does without a model counts against the limits of tenants too: texts that it tokenises, and the like."""

from __future__ import annotations

from starlette.requests import Request

from archerfish.serve.catalog import Catalog
from archerfish.serve.middleware import caller_of, tenant_of
from archerfish.serve.wire import Charge

CHARACTERS_PER_TOKEN = 4  # until a text has been tokenised


async def charge(catalog: Catalog, request: Request, num_characters: int, num_tokens: int = 0) -> int:
    """Take a request and its tokens, before they are counted, from the limits of the caller; how many tokens were taken.

    Raises RemoteError where the limits do not allow it. Who has no limits costs no question to the engine process.
    """
    tenant = tenant_of(request)
    if not tenant.requests_per_minute and not tenant.tokens_per_minute:
        return 0
    taken = num_tokens + num_characters // CHARACTERS_PER_TOKEN
    await catalog.backend.ask(_message(catalog, request, taken))
    return taken


async def set_right(catalog: Catalog, request: Request, taken: int, num_tokens: int) -> None:
    """Give back, or take, what a charge was wrong by."""
    if tenant_of(request).tokens_per_minute and num_tokens != taken:
        await catalog.backend.ask(_message(catalog, request, num_tokens - taken, is_spent=True))


def _message(catalog: Catalog, request: Request, num_tokens: int, *, is_spent: bool = False) -> Charge:
    return Charge(
        request_id=catalog.new_id(), num_tokens=num_tokens, is_spent=is_spent, credentials=catalog.credentials,
        tenant=caller_of(request),
    )
