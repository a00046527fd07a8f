"""Refusals of the engine process that were heard a moment ago: a front end that repeats them has time for what is let in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from archerfish.observe.metrics import MetricRegistry
from archerfish.serve.client import RemoteError
from archerfish.serve.identity import tenant_in
from archerfish.serve.middleware import stated_length

HOLD_S = 0.1  # for which nobody else is asked: short against what waits in front of a model that refuses
FULL = "overloaded"  # the code of a refusal that says something of the model, as those do that say what a request needs
PATHS = frozenset(("/v1/embeddings", "/v1/rerank", "/similarity"))
MAX_BODY_BYTES = 1 << 16  # what a server hands over as one piece
STATE = "refusal"
REPEATED = "Refusals that a front end gave again, which the engine process has not counted."
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
    needs_s: tuple[float, float] | None
    wish: Wish
    route: Any
    messages: tuple[Message, ...]

    def holds_for(self, wish: Wish) -> bool:
        """Whether another wish has too many texts for the room there was, or too little time."""
        (num_texts, num_characters), (least_texts, refused_characters) = wish.size(), self.wish.size()
        if num_texts < least_texts or len(wish.query) < len(self.wish.query):  # which may be read with every document
            return False
        if self.needs_s is None:
            return wish.deadline_s == self.wish.deadline_s
        least_s, character_s = self.needs_s
        return wish.deadline_s is not None and wish.deadline_s < least_s + (num_characters - refused_characters) * character_s


class Refusals:
    """Repeats the last refusal for want of time or room to whom it holds for too, as long as it counts.

    The body is looked at and not checked, so that a refusal costs a small part of an answer. What comes in several pieces, or
    is not read here, is asked for.
    """

    def __init__(self, app: ASGIApp, registry: MetricRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.app, self._clock = app, clock
        self._repeated = registry.counter("archerfish_repeated_refusals_total", REPEATED, ("route",))
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
            self._repeated.add(route=scope["path"])
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
        error = scope["state"].get(STATE)
        if isinstance(error, RemoteError):
            self._hear(scope, body, error, tuple(sent))

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

    def _hear(self, scope: Scope, body: bytes, error: RemoteError, messages: tuple[Message, ...]) -> None:
        if (wish := wish_of(body)) is not None:
            self._heard[scope["path"], tenant_in(scope).name, wish.model] = Refusal(
                self._clock(), error.needs_s, wish, scope.get("route"), messages
            )


def wish_of(body: bytes) -> Wish | None:
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def note_refusal(request: Request, error: RemoteError) -> None:
    """Let `Refusals` know that the answer to this request is one of those to be repeated."""
    if error.code == FULL or error.needs_s is not None:
        request.scope["state"][STATE] = error
