"""Which models a backend serves, under which names, and how a request is addressed to one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request

from archerfish.serve.client import Backend
from archerfish.serve.errors import InvalidParameterError, UnservedModelError
from archerfish.serve.host_config import hint_for, names_of
from archerfish.serve.wire import Query, Report

Kind = Literal["generation", "embedding", "cross-encoder"]
REFRESH_S = 1.0  # a name that is not known is looked for again, but not more often than this


@dataclass(frozen=True)
class ModelCard:
    """What the engine process says of a model."""

    id: str
    kind: Kind
    max_length: int
    dimension: int = 0
    directory: str = ""
    aliases: tuple[str, ...] = ()
    vocab_size: int = 0
    max_prompt_bytes: int = 0  # 0: no limit
    is_tts: bool = False  # it writes tokens of speech, and no text

    @classmethod
    def read(cls, values: dict[str, Any]) -> ModelCard:
        names = ("id", "kind", "max_length", "dimension", "directory", "vocab_size", "max_prompt_bytes", "is_tts")
        known = {name: values[name] for name in names if name in values}
        return cls(**known, aliases=tuple(values.get("aliases", ())))

    @property
    def names(self) -> list[str]:
        return names_of(self.id, self.aliases)


class Catalog:
    """The models of a backend, asked for when they are first needed."""

    def __init__(
        self, backend: Backend, credentials: str = "", *, caller_of: Callable[[Request], str] = lambda request: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """credentials: the pass of this front end, with which it may say whose request one is: `caller_of`."""
        self.backend = backend
        self.started_at = int(time.time())
        self.credentials, self._caller_of, self._clock = credentials, caller_of, clock
        self._cards: list[ModelCard] = []
        self._asked_at = float("-inf")
        self._ids = itertools.count()

    def new_id(self) -> str:
        return f"r{next(self._ids)}"

    def address(self, request: Request, card: ModelCard) -> dict[str, Any]:
        """Fields of a message of a client's request to a model."""
        return {
            "request_id": self.new_id(), "model": card.id, "credentials": self.credentials, "tenant": self._caller_of(request)
        }

    async def cards(self) -> list[ModelCard]:
        if not self._cards:
            await self.refresh()
        return self._cards

    async def refresh(self) -> None:
        answer = await self.backend.ask(Query(request_id=self.new_id(), about="models", credentials=self.credentials))
        assert isinstance(answer, Report)
        self._cards = [ModelCard.read(values) for values in answer.values["models"]]
        self._asked_at = self._clock()

    async def named(self, name: str) -> ModelCard:
        """The model of a name, whatever it does."""
        for is_last in (False, True):
            fitting = [card for card in await self.cards() if name in card.names]
            if fitting:
                return next((card for card in fitting if card.id == name), fitting[0])
            if is_last or self._clock() - self._asked_at < REFRESH_S:
                break
            await self.refresh()
        hint = hint_for(name, [card.id for card in await self.cards()])
        raise UnservedModelError(f"The model {name!r} is not served here.", hint=hint)

    async def find(self, name: str | None, *kinds: Kind) -> ModelCard:
        """The model that a request names, if of one of these kinds; without a name, the first of the first kind there is."""
        if name is None:
            cards = await self.cards()
            found = next((card for kind in kinds for card in cards if card.kind == kind), None)
            if found is None:
                raise InvalidParameterError(f"No {' or '.join(kinds)} model is served here; see GET /v1/models.", "model")
            return found
        card = await self.named(name)
        if card.kind not in kinds:
            raise InvalidParameterError(f"The model {name!r} does not serve this route; see GET /v1/models.", "model")
        return card

    def describe(self, card: ModelCard) -> dict[str, Any]:
        """As GET /v1/models shows it."""
        shown: dict[str, Any] = {"id": card.id, "object": "model", "created": self.started_at, "owned_by": "archerfish"}
        shown |= {"kind": "tts" if card.is_tts else card.kind, "max_length": card.max_length}
        return shown | {"dimension": card.dimension} if card.kind == "embedding" else shown
