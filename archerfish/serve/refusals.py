"""Refusals of the engine process that were heard a moment ago: a front end that repeats them has time for what is let in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from archerfish.serve.client import RemoteError
from archerfish.serve.identity import tenant_in
from archerfish.serve.middleware import stated_length

HOLD_S = 0.05  # for which nobody else is asked: short against what waits in front of a model that refuses
CODES = ("deadline_unreachable", "overloaded")  # that say something of the model, not of the request
PATHS = frozenset(("/v1/embeddings", "/v1/rerank", "/similarity"))
MAX_BODY_BYTES = 1 << 16  # what a server hands over as one piece
STATE = "is_refused"
Texts = str | list[str]


class Wish(msgspec.Struct):
    """What of a body counts for whether it is let in; token ids and documents that are objects are left to the engine."""

    model: str | None = None
    deadline_s: float | None = None
    input: Texts = ""
    query: str = ""
    documents: list[str] = []
    source: Texts = ""
    sentences: list[str] = []

    def size(self) -> tuple[int, int]:
        """Texts, and characters of all of them."""
        parts = (self.input, self.query, self.documents, self.source, self.sentences)
        texts = [text for part in parts if part for text in (part if isinstance(part, list) else (part,))]
        return len(texts), sum(map(len, texts))


_decode = msgspec.json.Decoder(Wish).decode


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer to a wish, as it was sent."""

    heard_at: float
    deadline_s: float | None
    num_texts: int
    num_characters: int
    route: Any
    messages: tuple[Message, ...]

    def holds_for(self, wish: Wish) -> bool:
        """Whether one wishes for no less, in no more time."""
        if wish.deadline_s is None or self.deadline_s is None:
            is_as_soon = wish.deadline_s is self.deadline_s
        else:
            is_as_soon = wish.deadline_s <= self.deadline_s
        num_texts, num_characters = wish.size()
        return is_as_soon and num_texts >= self.num_texts and num_characters >= self.num_characters


class Refusals:
    """Repeats the last refusal for want of time or room to who asks for as much of the same model, as long as it counts.

    The body is looked at and not checked, so that a refusal costs a small part of an answer. What comes in several pieces, or
    is not read here, is asked for.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self.app, self._clock = app, clock
        self._heard: dict[tuple[str, str, str | None], Refusal] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_watched = scope["type"] == "http" and scope["path"] in PATHS and scope["method"] == "POST"
        num_bytes = stated_length(scope) if is_watched else 0
        if not 0 < num_bytes <= MAX_BODY_BYTES:
            await self.app(scope, receive, send)
            return
        first = await receive()
        body: bytes = first.get("body", b"")
        if len(body) < num_bytes:
            body = b""
        refusal = self._find(scope, body) if self._heard else None
        if refusal is not None:
            scope["route"] = refusal.route  # under which it counts
            for message in refusal.messages:
                await send(message)
            return
        came, sent = [first], list[Message]()

        async def replayed() -> Message:
            return came.pop() if came else await receive()

        async def noted(message: Message) -> None:
            sent.append(message)
            await send(message)

        await self.app(scope, replayed, noted)
        if scope["state"].get(STATE):
            self._hear(scope, body, tuple(sent))

    def _find(self, scope: Scope, body: bytes) -> Refusal | None:
        wish = wish_of(body)
        if wish is None:
            return None
        key = scope["path"], tenant_in(scope).name, wish.model
        refusal = self._heard.get(key)
        if refusal is None:
            return None
        if self._clock() - refusal.heard_at >= HOLD_S:
            del self._heard[key]
            return None
        return refusal if refusal.holds_for(wish) else None

    def _hear(self, scope: Scope, body: bytes, messages: tuple[Message, ...]) -> None:
        if (wish := wish_of(body)) is not None:
            self._heard[scope["path"], tenant_in(scope).name, wish.model] = Refusal(
                self._clock(), wish.deadline_s, *wish.size(), scope.get("route"), messages
            )


def wish_of(body: bytes) -> Wish | None:
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def note_refusal(request: Request, error: RemoteError) -> None:
    """Let `Refusals` know that the answer to this request is one of those to be repeated."""
    if error.code in CODES and not error.is_missed:
        request.scope["state"][STATE] = True
