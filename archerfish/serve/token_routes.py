"""Routes about tokens: /tokenize, /detokenize and /v1/cache/explain, and /v1/tts/tokens, the tokens of speech of a text."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator
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
from archerfish.serve.answers import Detokenized, Tokens, TTSAnswer
from archerfish.serve.bodies import (
    IDS,
    NULL,
    STRING,
    Body,
    BodyRoute,
    Checked,
    GenerationBody,
    bounded,
    check_text,
    check_token_ids,
    wrong_value,
)
from archerfish.serve.catalog import ContextLengthError, ModelCard, ModelText, chat_size, in_thread
from archerfish.serve.chat_bodies import Messages, Tools
from archerfish.serve.errors import InvalidParameterError, failure_body, json_response, json_type, with_param
from archerfish.serve.generation import ChoiceDelta, Generation, TextService, new_id, usage_of
from archerfish.serve.sharing import charge, set_right
from archerfish.serve.sse import DONE, data_event, unless_gone
from archerfish.serve.wire import ExplainRequest, Report

# Tokenizer and cache


def read_prompt(value: Any, where: str) -> str | list[int] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return check_text(value, where)
    if not isinstance(value, list):
        raise wrong_value(f"{where} must be a string or a list of token ids, not {json_type(value)}.")
    return check_token_ids(value, where)


def read_tokens(value: Any, where: str) -> list[int]:
    return [] if value == [] else check_token_ids(value, where)


class TokenizeBody(Body):
    """POST /tokenize, in vLLM's form: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: Annotated[str, Checked(check_text, STRING)] | None = None
    messages: Messages | None = None
    tools: Tools = Field([])
    add_special_tokens: bool = Field(True, description="Put special tokens, such as the one for the beginning, before it.")
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize, in vLLM's form."""

    model: str | None = None
    tokens: Annotated[list[int], Checked(read_tokens, {"type": "array", "items": {"type": "integer"}})]
    skip_special_tokens: bool = False


class ExplainBody(Body):
    """POST /v1/cache/explain: a prompt in text or token ids, or the messages of a conversation."""

    model: str | None = None
    prompt: Annotated[str | list[int] | None, Checked(read_prompt, {"anyOf": [STRING, IDS, NULL]})] = None
    messages: Messages | None = None
    tools: Tools = Field([])


class TextRoutes:
    """Routes that read texts and generate none."""

    def __init__(self, service: TextService) -> None:
        self.service, self.catalog = service, service.catalog
        self.routes = [
            BodyRoute("/tokenize", self.tokenize, TokenizeBody),
            BodyRoute("/detokenize", self.detokenize, DetokenizeBody),
            BodyRoute("/v1/cache/explain", self.explain, ExplainBody),
        ]

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """Token ids of a text."""
        text = await self._any_text(body.model)
        token_ids = await self._token_ids(request, text, body, body.add_special_tokens)

        def answer() -> Response:
            strings = [text.token(token_id)[0] for token_id in token_ids] if body.return_token_strs else None
            max_length = text.card.max_length
            return json_response(Tokens(count=len(token_ids), max_model_len=max_length, tokens=token_ids, token_strs=strings))

        return await in_thread(answer, len(token_ids))

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        text = await self._any_text(body.model)
        await charge(self.catalog, request, 0, len(body.tokens))
        tokenizer = text.need_tokenizer("model")
        vocab_size, highest = max(tokenizer.vocab_size, text.card.vocab_size), max(body.tokens, default=0)
        if highest >= vocab_size:
            raise InvalidParameterError(f"Token id {highest} is outside of the vocabulary of {vocab_size:,}.", "tokens")
        decoded = await in_thread(lambda: tokenizer.decode(body.tokens, body.skip_special_tokens), len(body.tokens))
        return json_response(Detokenized(prompt=decoded))

    async def explain(self, request: Request, body: ExplainBody) -> Response:
        """What the cache has for a prompt of the caller, and why not more."""
        text = await self.service.find_text(body.model)
        token_ids = await self._token_ids(request, text, body)
        text.check_length(token_ids, "prompt")
        message = ExplainRequest(token_ids=token_ids, **self.catalog.address(request, text.card))
        answer = await unless_gone(request, self.catalog.backend.ask(message))
        assert isinstance(answer, Report)
        return json_response({"model": text.card.id, **answer.values})

    async def _any_text(self, name: str | None) -> ModelText:
        return await self.catalog.text_of(await self.catalog.find(name, "generation", "embedding", "cross-encoder"))

    async def _token_ids(
        self, request: Request, text: ModelText, body: TokenizeBody | ExplainBody, add_special_tokens: bool = True
    ) -> list[int]:
        """Tokens of the prompt or the conversation; they count against the caller's limits."""
        prompt, messages = body.prompt, body.messages
        if (prompt is None) == (messages is None):
            raise InvalidParameterError("Give either prompt or messages.", "prompt")
        if isinstance(prompt, list):
            await charge(self.catalog, request, 0, len(prompt))
            text.check_ids(prompt, "prompt")
            return prompt
        options = {"tools": body.tools} if body.tools else {}
        size = len(prompt or "") if messages is None else chat_size(messages, options)
        charged = await charge(self.catalog, request, size)
        if messages is not None:
            token_ids = await text.encode_chat(messages, "messages", options)
        else:
            token_ids = await text.encode(prompt or "", "prompt", add_special_tokens)
        await set_right(self.catalog, request, charged, len(token_ids))
        return token_ids


# TTS

MAX_TOKEN_BYTES = 128  # bytes of the longest text token of the World vocabulary
TTS_OPTIONS = (
    *PROPERTIES, "ref_global_tokens", "ref_semantic_tokens", "temperature", "top_p", "top_k", "max_tokens", "seed"
)  # fmt: skip


def read_reference(value: Any, where: str) -> list[int] | None:
    if value is not None and not isinstance(value, list):
        raise wrong_value(f"{where} must be a list of token ids, not {json_type(value)}.")
    return value


def reference_schema(num_tokens: int, **bounds: int) -> dict[str, Any]:
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": num_tokens - 1}, "minItems": 1, **bounds}
    return {"anyOf": [ids, NULL]}


def voice(kind: str) -> Any:
    """A property of the voice, by its name."""
    return Field(getattr(TTSRequest, kind), json_schema_extra={"enum": [*PROPERTIES[kind]]})


class TTSBody(GenerationBody):
    """POST /v1/tts/tokens: a text, and the voice that speaks it."""

    text: Annotated[str, Checked(check_text, {**STRING, "minLength": 1, "pattern": r"\S"})]
    model: str | None = Field(None, description="Name of the served model; left out: the first TTS model.")
    age: str = voice("age")
    gender: str = voice("gender")
    emotion: str = voice("emotion")
    pitch: str = voice("pitch")
    speed: str = voice("speed")
    ref_global_tokens: Annotated[
        list[int] | None,
        Checked(read_reference, reference_schema(NUM_GLOBAL, minItems=GLOBAL_LENGTH, maxItems=GLOBAL_LENGTH)),
    ] = Field(None, description="Global tokens of a voice to speak with; needs ref_semantic_tokens.")
    ref_semantic_tokens: Annotated[list[int] | None, Checked(read_reference, reference_schema(NUM_SEMANTIC))] = Field(
        None, description="Semantic tokens of that voice; checked and not used: a voice is its global tokens."
    )
    temperature: float | None = bounded(minimum=0, maximum=100)
    top_p: float | None = bounded(exclusiveMinimum=0, maximum=1)
    top_k: int | None = bounded(minimum=-1)
    max_tokens: int | None = bounded(None, f"Semantic tokens; never more than {MAX_SEMANTIC:,}.", minimum=1)
    seed: int | None = bounded(minimum=MIN_SEED, maximum=MAX_SEED - 1)

    @field_validator(*PROPERTIES, mode="before")
    @classmethod
    def _check_property(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            names = ", ".join(PROPERTIES[info.field_name or ""])
            raise wrong_value(f"{info.field_name} must be one of {names}, not {json_type(value)}.")
        return value

    def tts_request(self) -> TTSRequest:
        """The request for the sampler. An error names its parameter."""
        values = {name: getattr(self, name) for name in ("text", *TTS_OPTIONS)}
        try:
            return TTSRequest(**values)
        except InvalidInputError as error:
            param = next((word for word in re.findall(r"\w+", error.message) if word in values), None)
            raise with_param(error, param) if param else error from None


class TTSRoutes:
    """TTS tokens, whole or in a stream."""

    def __init__(self, service: TextService) -> None:
        self.service = service
        self.routes = [BodyRoute("/v1/tts/tokens", self.tokens, TTSBody)]

    async def tokens(self, request: Request, body: TTSBody) -> Response:
        """Global (speaker) and semantic (audio) tokens of a text."""
        text = await self.service.catalog.text_of(await self._find_card(body.model))
        tts_request = body.tts_request()
        text.check_bytes([tts_request.text], "text")
        max_length, num_bytes = text.card.max_length, len(tts_request.text.encode(errors="replace"))
        if num_bytes > max_length * MAX_TOKEN_BYTES:
            raise ContextLengthError(num_bytes // MAX_TOKEN_BYTES, max_length, "text", at_least=True)
        prompt_ids = await in_thread(tts_request.prompt, num_bytes)
        try:
            params = tts_request.params(max_length - len(prompt_ids))
        except InvalidInputError as error:
            raise with_param(error, "text") from None
        generation = self.service.prepare(request, body, text, prompt_ids, params)
        head: dict[str, Any] = {"id": new_id("tts", "-"), "created": int(time.time()), "model": generation.model}
        reference = list(tts_request.ref_global_tokens or ())
        if body.stream:
            return await self.service.stream(request, [generation], TTSEvents(generation, head, reference))
        await self.service.complete(request, generation)
        [choice] = generation.choices
        global_tokens, semantic_tokens = read_output(choice.token_ids)
        return json_response(TTSAnswer(
            **head, object="tts.tokens", global_tokens=reference + global_tokens, semantic_tokens=semantic_tokens,
            finish_reason=choice.finish_reason, usage=usage_of([generation]),
        ))  # fmt: skip

    async def _find_card(self, name: str | None) -> ModelCard:
        """The model that a request names, or the first TTS model."""
        catalog = self.service.catalog
        if name is None:
            able = [card for card in await catalog.cards() if can_speak(card)]
            found = next((card for card in able if card.is_tts), able[0] if able else None)
            if found is None:
                raise InvalidParameterError("No TTS model is served here; see GET /v1/models.", "model")
            return found
        card = await catalog.find(name, "generation")
        if not can_speak(card):
            raise InvalidParameterError(f"The model {name!r} has no TTS vocabulary; see GET /v1/models.", "model")
        return card


def can_speak(card: ModelCard) -> bool:
    return card.kind == "generation" and card.vocab_size >= VOCAB_SIZE


class TTSEvents:
    """Tokens in chunks. The first has the global tokens of a reference voice; the last says why the answer ended."""

    def __init__(self, generation: Generation, head: dict[str, Any], reference: list[int]) -> None:
        self._generation, self._head, self._reference = generation, head, reference

    def _chunk(self, global_tokens: list[int], semantic_tokens: list[int]) -> TTSAnswer:
        return TTSAnswer(
            **self._head, object="tts.tokens.chunk", global_tokens=global_tokens, semantic_tokens=semantic_tokens
        )

    def start(self) -> bytes:
        return data_event(self._chunk(self._reference, []))

    def delta(self, number: int, delta: ChoiceDelta) -> bytes:
        global_tokens, semantic_tokens = read_output(delta.token_ids)
        return data_event(self._chunk(global_tokens, semantic_tokens)) if global_tokens or semantic_tokens else b""

    def end(self) -> bytes:
        last = self._chunk([], [])
        last.finish_reason, last.usage = self._generation.choices[0].finish_reason, usage_of([self._generation])
        return data_event(last) + DONE

    def error(self, error: Exception) -> bytes:
        return data_event(failure_body(error))
