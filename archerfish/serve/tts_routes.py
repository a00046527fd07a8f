"""/v1/tts/tokens: speaker and audio tokens of a text, by a TTS model of RWKV-7."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, field_validator
from starlette.requests import Request
from starlette.responses import Response

from archerfish.engine.tts import (
    GLOBAL_LENGTH,
    MAX_SEMANTIC,
    NUM_GLOBAL,
    NUM_SEMANTIC,
    PROPERTIES,
    VOCAB_SIZE,
    TTSRequest,
    read_output,
)
from archerfish.errors import InvalidInputError
from archerfish.params import MAX_SEED, MIN_SEED
from archerfish.serve.catalog import ModelCard
from archerfish.serve.errors import InvalidParameterError, failure_body, json_response, kind_of
from archerfish.serve.generation import Answer, Order, Piece, TextService, checked_order
from archerfish.serve.openai_routes import DONE, usage_of
from archerfish.serve.openai_schemas import stated
from archerfish.serve.schemas import STRING, Body, BodyRoute, text_at, wrong
from archerfish.serve.served_texts import ContextLengthError, aside, blamed
from archerfish.serve.sse import dumped, quoted

LONGEST_TOKEN = 128  # bytes of a text's, in the World vocabulary
OPTIONS = (
    *PROPERTIES, "ref_global_tokens", "ref_semantic_tokens", "temperature", "top_p", "top_k", "max_tokens", "seed"
)  # fmt: skip


def reference(value: Any, where: str) -> list[int] | None:
    if value is not None and not isinstance(value, list):
        raise wrong(f"{where} must be a list of token ids, not {kind_of(value)}.")
    return value


def ids_schema(end: int, **bounds: int) -> WithJsonSchema:
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": end - 1}, "minItems": 1, **bounds}
    return WithJsonSchema({"anyOf": [ids, {"type": "null"}]})


def voice(kind: str) -> Any:
    """A property by its name; others are refused with the nearest known one."""
    return Field(getattr(TTSRequest, kind), json_schema_extra={"enum": [*PROPERTIES[kind]]})


class TTSBody(Body):
    """POST /v1/tts/tokens: a text, and the voice that speaks it."""

    text: Annotated[
        str, PlainValidator(lambda value: text_at(value, "text")), WithJsonSchema({**STRING, "minLength": 1, "pattern": r"\S"})
    ]
    model: str | None = Field(None, description="Name of the served model; left out: the first that speaks.")
    age: str = voice("age")
    gender: str = voice("gender")
    emotion: str = voice("emotion")
    pitch: str = voice("pitch")
    speed: str = voice("speed")
    ref_global_tokens: Annotated[
        list[int] | None, PlainValidator(lambda value: reference(value, "ref_global_tokens")),
        ids_schema(NUM_GLOBAL, minItems=GLOBAL_LENGTH, maxItems=GLOBAL_LENGTH),
    ] = Field(None, description="Of a voice to speak with, beside ref_semantic_tokens.")
    ref_semantic_tokens: Annotated[
        list[int] | None, PlainValidator(lambda value: reference(value, "ref_semantic_tokens")), ids_schema(NUM_SEMANTIC)
    ] = Field(None, description="What that voice says in its reference; checked, but not read: a voice is its global tokens.")
    temperature: float | None = stated(minimum=0, maximum=100)
    top_p: float | None = stated(exclusiveMinimum=0, maximum=1)
    top_k: int | None = stated(minimum=-1)
    max_tokens: int | None = stated(None, f"Semantic tokens; never more than {MAX_SEMANTIC:,}.", minimum=1)
    seed: int | None = stated(minimum=MIN_SEED, maximum=MAX_SEED - 1)
    priority: int = Field(0, description="Higher runs first.")
    deadline_s: float | None = Field(None, description="Seconds after which the request is given up.")
    stream: bool | None = False

    @field_validator(*PROPERTIES, mode="before")
    @classmethod
    def _named(cls, value: Any, field: ValidationInfo) -> Any:
        if not isinstance(value, str):
            names = ", ".join(PROPERTIES[field.field_name or ""])
            raise wrong(f"{field.field_name} must be one of {names}, not {kind_of(value)}.")
        return value

    def request(self) -> TTSRequest:
        """All that is wrong with it names its parameter."""
        values = {name: getattr(self, name) for name in ("text", *OPTIONS)}
        try:
            return TTSRequest(**values)
        except InvalidInputError as error:
            named = next((word for word in re.findall(r"\w+", error.message) if word in values), None)
            raise blamed(error, named) if named else error from None


class TTSRoutes:
    """TTS tokens, whole or as they come."""

    def __init__(self, service: TextService) -> None:
        self.service = service
        self.router = APIRouter(route_class=BodyRoute)
        self.router.post("/v1/tts/tokens", response_model=None)(self.tokens)

    async def tokens(self, request: Request, body: TTSBody) -> Response:
        """Global (speaker) and semantic (audio) tokens of a text."""
        text = await self.service.texts.of(await self._card(body.model))
        asked = body.request()
        text.check_bytes([asked.text], "text")
        most = text.card.max_length
        num_bytes = len(asked.text.encode(errors="replace"))
        if num_bytes > most * LONGEST_TOKEN:
            raise ContextLengthError(num_bytes // LONGEST_TOKEN, most, "text", at_least=True)
        prompt_ids = await aside(asked.prompt, num_bytes)
        try:
            params = asked.params(most - len(prompt_ids))
        except InvalidInputError as error:
            raise blamed(error, "text") from None
        order = checked_order(Order(text, prompt_ids, params, None, body.priority, body.deadline_s, bool(body.stream)))
        head = {"id": f"tts-{secrets.token_hex(12)}", "object": "tts.tokens", "created": int(time.time())}
        head["model"], known = text.card.id, list(asked.ref_global_tokens or ())
        if body.stream:
            return await self.service.stream(request, [order], TTSEvents(head, known))
        [(answer, [choice])] = await self.service.complete(request, [order])
        global_tokens, semantic_tokens = read_output(choice.token_ids)
        return json_response({
            **head, "global_tokens": known + global_tokens, "semantic_tokens": semantic_tokens,
            "finish_reason": choice.finish_reason, "usage": usage_of([answer]),
        })  # fmt: skip

    async def _card(self, name: str | None) -> ModelCard:
        """The model that a request names, or the first that speaks."""
        catalog = self.service.catalog
        if name is None:
            able = [card for card in await catalog.cards() if speaks(card)]
            found = next((card for card in able if card.is_tts), able[0] if able else None)
            if found is None:
                raise InvalidParameterError("No TTS model is served here; see GET /v1/models.", "model")
            return found
        card = await catalog.find(name, "generation")
        if not speaks(card):
            raise InvalidParameterError(f"The model {name!r} has no vocabulary of TTS; see GET /v1/models.", "model")
        return card


def speaks(card: ModelCard) -> bool:
    return card.kind == "generation" and card.vocab_size >= VOCAB_SIZE


class TTSEvents:
    """Tokens in chunks. The voice of a reference stands in the first; the last says why it ended."""

    def __init__(self, head: dict[str, Any], known: list[int]) -> None:
        self._head = b"data: " + dumped({**head, "object": "tts.tokens.chunk"})[:-1]
        self._known = known
        self._reason = "stop"

    def begin(self, answers: Sequence[Answer]) -> bytes:
        return self._chunk(self._known, [])

    def piece(self, number: int, piece: Piece) -> bytes:
        self._reason = piece.finish_reason or self._reason
        global_tokens, semantic_tokens = read_output(piece.token_ids)
        return self._chunk(global_tokens, semantic_tokens) if global_tokens or semantic_tokens else b""

    def end(self, answers: Sequence[Answer]) -> bytes:
        rest = b',"finish_reason":%s,"usage":%s}\n\n' % (quoted(self._reason), quoted(usage_of(answers)))
        return self._chunk([], [])[: -len(PLAIN_END)] + rest + DONE

    def error(self, error: Exception) -> bytes:
        return b"data: " + dumped(failure_body(error)) + b"\n\n"

    def _chunk(self, global_tokens: list[int], semantic_tokens: list[int]) -> bytes:
        tokens = b',"global_tokens":%s,"semantic_tokens":%s' % (quoted(global_tokens), quoted(semantic_tokens))
        return self._head + tokens + PLAIN_END


PLAIN_END = b',"finish_reason":null}\n\n'
