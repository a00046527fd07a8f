"""/tokenize, /detokenize and /v1/cache/explain."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from archerfish.serve.charges import charge, set_right
from archerfish.serve.errors import InvalidParameterError, json_response, kind_of
from archerfish.serve.generation import TextService
from archerfish.serve.openai_schemas import Messages, Tools
from archerfish.serve.presence import unless_gone
from archerfish.serve.schemas import IDS, NULL, STRING, Body, BodyRoute, text_at, token_ids_at, wrong
from archerfish.serve.served_texts import ServedText, aside, chat_size
from archerfish.serve.wire import ExplainRequest, Report


def text_or_ids(value: Any) -> str | list[int] | None:
    if value is None or isinstance(value, str):
        return None if value is None else text_at(value, "prompt")
    if not isinstance(value, list):
        raise wrong(f"prompt must be a string or a list of token ids, not {kind_of(value)}.")
    return token_ids_at(value, "prompt")


def ids_or_none(value: Any) -> list[int]:
    return [] if value == [] else token_ids_at(value, "tokens")


Prompt = Annotated[str | list[int] | None, PlainValidator(text_or_ids), WithJsonSchema({"anyOf": [STRING, IDS, NULL]})]
Ids = Annotated[list[int], PlainValidator(ids_or_none), WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


class TokenizeBody(Body):
    """POST /tokenize, as vLLM has it: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: Annotated[str, PlainValidator(lambda value: text_at(value, "prompt")), WithJsonSchema(STRING)] | None = None
    messages: Messages | None = None
    tools: Tools = Field([])
    add_special_tokens: bool = Field(True, description="Whether tokens such as that of the beginning are put before a prompt.")
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize, as vLLM has it."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False


class ExplainBody(Body):
    """POST /v1/cache/explain: a prompt in text or token ids, or the messages of a conversation."""

    model: str | None = None
    prompt: Prompt = None
    messages: Messages | None = None
    tools: Tools = Field([])


class TextRoutes:
    """What the front end and the cache know of texts, without generating any."""

    def __init__(self, service: TextService) -> None:
        self.service = service
        self.router = APIRouter(route_class=BodyRoute)
        self.router.post("/tokenize", response_model=None)(self.tokenize)
        self.router.post("/detokenize", response_model=None)(self.detokenize)
        self.router.post("/v1/cache/explain", response_model=None)(self.explain)

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """Token ids of a text."""
        text = await self._any_model(body.model)
        token_ids = await self._token_ids(request, text, body, body.add_special_tokens)

        def answer() -> Response:
            strings = [text.token(token_id)[0] for token_id in token_ids] if body.return_token_strs else None
            counts = {"count": len(token_ids), "max_model_len": text.card.max_length}
            return json_response({**counts, "tokens": token_ids, "token_strs": strings})

        return await aside(answer, len(token_ids))

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        text = await self._any_model(body.model)
        await charge(self.service.catalog, request, 0, len(body.tokens))
        tokenizer = text.need_tokenizer("model")
        num_known, highest = max(tokenizer.vocab_size, text.card.vocab_size), max(body.tokens, default=0)
        if highest >= num_known:
            raise InvalidParameterError(f"Token id {highest} is outside of the vocabulary of {num_known:,}.", "tokens")
        decoded = await aside(lambda: tokenizer.decode(body.tokens, body.skip_special_tokens), len(body.tokens))
        return json_response({"prompt": decoded})

    async def explain(self, request: Request, body: ExplainBody) -> Response:
        """What the cache has for a prompt of the caller, and why not more."""
        text = await self.service.model(body.model)
        token_ids = await self._token_ids(request, text, body)
        text.check_length(token_ids, "prompt")
        address = self.service.catalog.address(request, text.card)
        answer = await unless_gone(request, self.service.catalog.backend.ask(ExplainRequest(token_ids=token_ids, **address)))
        assert isinstance(answer, Report)
        return json_response({"model": text.card.id, **answer.values})

    async def _any_model(self, name: str | None) -> ServedText:
        catalog = self.service.catalog
        return await self.service.texts.of(await catalog.find(name, "generation", "embedding", "cross-encoder"))

    async def _token_ids(
        self, request: Request, text: ServedText, body: TokenizeBody | ExplainBody, add_special_tokens: bool = True
    ) -> list[int]:
        """Of the prompt or the conversation; they count against the caller's limits."""
        prompt, messages, catalog = body.prompt, body.messages, self.service.catalog
        if (prompt is None) == (messages is None):
            raise InvalidParameterError("Give either prompt or messages.", "prompt")
        if isinstance(prompt, list):
            await charge(catalog, request, 0, len(prompt))
            text.check_ids(prompt, "prompt")
            return prompt
        options = {"tools": body.tools} if body.tools else {}
        taken = await charge(catalog, request, chat_size(messages, options) if messages is not None else len(prompt or ""))
        if messages is not None:
            token_ids = await text.encode_chat(messages, "messages", options)
        else:
            token_ids = await text.encode(prompt or "", "prompt", add_special_tokens)
        await set_right(catalog, request, taken, len(token_ids))
        return token_ids
