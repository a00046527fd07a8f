"""Routes about tokens: /tokenize, /detokenize and /v1/cache/explain, and /v1/tts/tokens, the tokens of speech of a
text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from archerfish.engine import tts
from archerfish.engine.request_maker import check_prompt_bytes
from archerfish.engine.tts import PROPERTIES, TTSRequest
from archerfish.errors import InvalidInputError
from archerfish.serve import bodies
from archerfish.serve import generation as gen
from archerfish.serve.answers import Detokenized, Tokens, TTSAnswer
from archerfish.serve.bodies import NULL, STRING, GenerationBody, Messages, Tools, bounded, checked
from archerfish.serve.catalog import ContextLengthError, ModelCard, ModelText, in_thread
from archerfish.serve.errors import InvalidParameterError, data_event, json_response, naming
from archerfish.serve.http import BodyRoute, EventStream, EventWriter
from archerfish.serve.openai_routes import DONE, TemplateBody
from archerfish.serve.wire import ExplainRequest

# Tokenizer and cache


def read_prompt(value: Any, where: str) -> Any:
    if isinstance(bodies.check_type(value, str | list | None, where, "a string or a list of token ids"), list):
        bodies.check_token_ids(value, where)
    return value


class ExplainBody(TemplateBody, bodies.ModelBody):
    """POST /v1/cache/explain: a prompt in text or token ids, or the messages of a conversation."""

    prompt: Annotated[str | list[int] | None, checked(read_prompt, {"anyOf": [STRING, bodies.IDS, NULL]})] = None
    messages: Messages | None = None
    tools: Tools = Field([])


class TokenizeBody(ExplainBody):
    """POST /tokenize, in vLLM's form: a prompt in text, or the messages of a conversation."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(bodies.ModelBody):
    """POST /detokenize, in vLLM's form."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=bodies.MAX_TOKEN_ID)]], Field(fail_fast=True)]
    skip_special_tokens: bool = False


class TextRoutes:
    """Routes that read texts and generate none."""

    def __init__(self, service: gen.TextService) -> None:
        self.service, self.catalog = service, service.catalog
        self.routes = [
            BodyRoute("/tokenize", self.tokenize, TokenizeBody, Tokens),
            BodyRoute("/detokenize", self.detokenize, DetokenizeBody, Detokenized),
            BodyRoute("/v1/cache/explain", self.explain, ExplainBody, dict[str, Any]),
        ]

    async def tokenize(self, request: Request, body: TokenizeBody) -> ASGIApp:
        """Token ids of a text."""
        text = await self.catalog.find_text(body.model, "generation", "embedding", "cross-encoder", request=request)
        token_ids = await self._token_ids(request, text, body)

        def answer() -> Response:
            strings = [text.token(token_id)[0] for token_id in token_ids] if body.return_token_strs else None
            max_length = text.card.max_length
            return json_response(
                Tokens(count=len(token_ids), max_model_len=max_length, tokens=token_ids, token_strs=strings)
            )

        return await in_thread(answer, len(token_ids))

    async def detokenize(self, request: Request, body: DetokenizeBody) -> ASGIApp:
        """The text of token ids."""
        text = await self.catalog.find_text(body.model, "generation", "embedding", "cross-encoder", request=request)
        await self.catalog.charge(request, len(body.tokens))
        tokenizer = text.need_tokenizer("model")
        longest = max(card.max_length for card in await self.catalog.cards())
        if len(body.tokens) > longest:
            message = f"tokens has {len(body.tokens):,} ids; the longest context served here has {longest:,}."
            raise InvalidParameterError(message, "tokens")
        vocab_size, highest = max(tokenizer.vocab_size, text.card.vocab_size), max(body.tokens, default=0)
        if highest >= vocab_size:
            raise InvalidParameterError(f"Token id {highest} is outside of the vocabulary of {vocab_size:,}.", "tokens")
        decoded = await in_thread(lambda: tokenizer.decode(body.tokens, body.skip_special_tokens), len(body.tokens))
        return json_response(Detokenized(prompt=decoded))

    async def explain(self, request: Request, body: ExplainBody) -> ASGIApp:
        """What the cache has for a prompt of the caller, and why not more."""
        text = await self.catalog.find_text(body.model, "generation", request=request)
        token_ids = await self._token_ids(request, text, body)
        with naming("prompt"):
            text.check_length(token_ids)
        message = ExplainRequest(token_ids=token_ids, **self.catalog.address(request, text.card))
        return json_response({"model": text.card.id, **await self.catalog.report(message)})

    async def _token_ids(self, request: Request, text: ModelText, body: ExplainBody) -> list[int]:
        """Tokens of the prompt or the conversation; they count against the caller's limits."""
        prompt, messages = body.prompt, body.messages
        if (prompt is None) == (messages is None):
            raise InvalidParameterError("Give either prompt or messages.", "prompt")
        if isinstance(prompt, list):
            await self.catalog.charge(request, len(prompt))
            with naming("prompt"):
                text.check_ids(prompt)
            return prompt
        others: dict[str, Any] = {"add_special_tokens": body.add_special_tokens}
        if messages is None:
            return await self.catalog.encode_charged(request, text, prompt or "", "prompt", **others)
        messages, options, start = body.conversation(messages)
        options |= {"tools": bodies.described_tools(body.tools)} if body.tools else {}
        return await self.catalog.encode_charged(request, text, messages, "messages", options, start, **others)


# TTS

MAX_TOKEN_BYTES = 128  # bytes of the longest text token of the World vocabulary


def voice(kind: str) -> Any:
    """A property of the voice, by its name."""
    return Field(getattr(TTSRequest, kind), json_schema_extra={"enum": [*PROPERTIES[kind]]})


class TTSBody(GenerationBody):
    """POST /v1/tts/tokens: a text, and the voice that speaks it."""

    text: str = Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})
    age: str = voice("age")
    gender: str = voice("gender")
    emotion: str = voice("emotion")
    pitch: str = voice("pitch")
    speed: str = voice("speed")
    ref_global_tokens: bodies.IntList | None = Field(
        None, description=f"Global tokens of a voice to speak with, {tts.GLOBAL_LENGTH}; needs ref_semantic_tokens."
    )
    ref_semantic_tokens: bodies.IntList | None = Field(
        None, description="Semantic tokens of that voice; checked and not used: a voice is its global tokens."
    )
    max_tokens: int | None = bounded(None, f"Semantic tokens; never more than {tts.MAX_SEMANTIC:,}.", minimum=1)

    def tts_request(self) -> TTSRequest:
        """The request for the sampler. An error names its parameter."""
        values = {name: getattr(self, name) for name in TTSRequest.__dataclass_fields__}
        try:
            return TTSRequest(**values)
        except InvalidInputError as error:
            error.param = gen.named_in(error.message, values)
            raise


class TTSRoutes:
    """TTS tokens, whole or in a stream."""

    def __init__(self, service: gen.TextService) -> None:
        self.service = service
        self.routes = [BodyRoute("/v1/tts/tokens", self.tokens, TTSBody, TTSAnswer, [TTSAnswer])]

    async def tokens(self, request: Request, body: TTSBody) -> ASGIApp:
        """Global (speaker) and semantic (audio) tokens of a text."""
        text = await self.service.catalog.text_of(await self._find_card(request, body.model))
        tts_request = body.tts_request()
        max_length, num_bytes = text.card.max_length, len(tts_request.text.encode(errors="replace"))
        with naming("text"):
            if text.card.max_prompt_bytes:
                check_prompt_bytes([tts_request.text], text.card.max_prompt_bytes)
            if num_bytes > max_length * MAX_TOKEN_BYTES:
                raise ContextLengthError(num_bytes // MAX_TOKEN_BYTES, max_length, at_least=True)
            prompt_ids = await in_thread(tts_request.prompt, num_bytes)
            params = tts_request.params(max_length - len(prompt_ids))
        generation = self.service.prepare(request, body, text, prompt_ids, params)
        head = gen.answer_head("tts", text.card.id)
        reference = list(tts_request.ref_global_tokens or ())
        if body.stream:
            return EventStream(self.service, request, [generation], TTSEvents(generation, head, reference))
        await self.service.complete(request, generation)
        [choice] = generation.choices
        global_tokens, semantic_tokens = tts.read_output(choice.token_ids)
        return json_response(
            TTSAnswer(
                **head,
                object="tts.tokens",
                global_tokens=reference + global_tokens,
                semantic_tokens=semantic_tokens,
                finish_reason=choice.finish_reason,
                usage=gen.usage_of([generation]),
            )
        )

    async def _find_card(self, request: Request, name: str | None) -> ModelCard:
        """The model that a request names, or the first TTS model."""
        catalog = self.service.catalog
        cards = await catalog.cards() if name is None else [await catalog.find(name, "generation", request=request)]
        able = [card for card in cards if card.kind == "generation" and card.vocab_size >= tts.VOCAB_SIZE]
        if not able:
            problem = "No TTS model is served here" if name is None else f"The model {name!r} has no TTS vocabulary"
            raise InvalidParameterError(f"{problem}; see GET /v1/models.", "model")
        return max(able, key=lambda card: card.is_tts)


class TTSEvents(EventWriter):
    """Tokens in chunks. The first has the global tokens of a reference voice; the last says why the answer ended."""

    def __init__(self, generation: gen.Generation, head: dict[str, Any], reference: list[int]) -> None:
        self._generation = generation
        self._head = head
        self._reference = reference

    def _chunk(self, global_tokens: list[int], semantic_tokens: list[int]) -> TTSAnswer:
        return TTSAnswer(
            **self._head, object="tts.tokens.chunk", global_tokens=global_tokens, semantic_tokens=semantic_tokens
        )

    def start(self) -> bytes:
        return data_event(self._chunk(self._reference, []))

    def delta(self, delta: gen.ChoiceDelta) -> bytes:
        global_tokens, semantic_tokens = tts.read_output(delta.token_ids)
        return data_event(self._chunk(global_tokens, semantic_tokens)) if global_tokens or semantic_tokens else b""

    def end(self) -> bytes:
        last = self._chunk([], [])
        last.finish_reason, last.usage = self._generation.choices[0].finish_reason, gen.usage_of([self._generation])
        return data_event(last) + DONE
