"""The routes of Ollama's API, for its clients: /api/chat, /api/generate, /api/embed and what describes the models.

Streams are lines of JSON, and a request streams unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, UnsetType
from pydantic import Field, ValidationInfo, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from archerfish import __version__
from archerfish.errors import InvalidInputError, UnsupportedModelError
from archerfish.serve import bodies
from archerfish.serve import generation as gen
from archerfish.serve.answers import ChosenLogprob
from archerfish.serve.bodies import UNUSED, check_type, checked
from archerfish.serve.catalog import Catalog, ModelCard, ModelText, read_metadata
from archerfish.serve.errors import PlainError, Schema, check_members, encode_json, failure_body, json_response
from archerfish.serve.formats import response_grammar
from archerfish.serve.http import BodyRoute, EventStream, EventWriter
from archerfish.serve.vector_routes import Truncate, VectorRoutes, encode_items

API_VERSION = "0.12.0"  # of Ollama, whose API these routes follow: some clients refuse older ones
RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", *RENAMED)
MESSAGE_MEMBERS = ("role", "content", "tool_calls", "tool_name", "name", "tool_call_id", "thinking")
NEVER = "2318-01-01T00:00:00Z"  # when a model is unloaded
KeepAlive = float | str | None
LINES = "application/x-ndjson"
LINE_HEADERS = [(b"content-type", LINES.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


# Bodies


def read_ollama_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A conversation in OpenAI's form: arguments of calls are text there, and results of tools name their call."""
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(check_type(value, list, where, "a list of messages")):
        place = f"{where}[{index}]"
        check_members(message, MESSAGE_MEMBERS, place)
        found = {name: message.get(name) for name in ("role", "content", "name", "tool_call_id")}
        found["reasoning_content"] = message.get("thinking")
        calls = check_type(message.get("tool_calls") or [], list, f"{place}.tool_calls", "a list")
        found["tool_calls"] = [openai_call(call) for call in calls]
        if found["role"] == "tool":
            found["name"] = message.get("tool_name") or found["name"]
            found["tool_call_id"] = found["tool_call_id"] or ""
        messages.append(found)
    return bodies.read_messages(messages, where) if messages else []


def openai_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


class OllamaBody(bodies.ToolBody):
    """What chat and generate have in common. `options` holds the parameters of sampling."""

    format_param: ClassVar[str] = "format"

    stream: bool | None = True
    options: dict[str, Any] | None = Field(None, description=f"Used: {', '.join(OPTIONS)}.")
    format: dict[str, Any] | str | None = Field(None, description='"json", or a JSON schema.')
    keep_alive: KeepAlive = Field(None, description=UNUSED)
    think: bool | str | None = Field(
        None, description="low, medium or high: how much; for chat templates that read it."
    )
    truncate: bool | None = Field(None, description=UNUSED)
    shift: bool | None = Field(None, description=UNUSED)
    stop: bodies.Stop = None
    max_tokens: int | None = bodies.bounded(description="The option num_predict.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _read_options(cls, data: Any, info: ValidationInfo) -> Any:
        options = data.get("options") if isinstance(data, dict) else None
        if not isinstance(options, dict):
            return data
        unused = sorted(options.keys() - set(OPTIONS))
        if unused and info.context is not None:
            info.context.append(bodies.without_effect(*unused))
        stated = {RENAMED.get(name, name): options[name] for name in OPTIONS if options.get(name) is not None}
        return {**stated, **data}

    def effort(self) -> tuple[str, str]:
        return "think", self.think if isinstance(self.think, str) else {True: "medium", False: "none", None: ""}[
            self.think
        ]

    @classmethod
    def read_format(cls, stated: Any, where: str) -> dict[str, Any] | None:
        if isinstance(stated, dict):
            return response_grammar({"type": "json_schema", "schema": stated, "strict": True}, where)
        if stated not in ("", "json"):
            raise InvalidInputError(f'{where} must be "json" or a JSON schema, which is an object.')
        return {"kind": "json", "value": None} if stated else None

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        is_limited = self.max_tokens is not None and self.max_tokens >= 0  # Ollama: -1 and -2 are no limit
        values["max_tokens"] = self.max_tokens if is_limited else None
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values, {**names, **{ours: theirs for theirs, ours in RENAMED.items()}, "logprobs": "top_logprobs"}


class OllamaChatBody(OllamaBody):
    """POST /api/chat, in Ollama's form."""

    messages: Annotated[list[dict[str, Any]], checked(read_ollama_messages, bodies.OBJECTS)] = Field(
        [], description="Without messages, the answer says that the model is loaded."
    )


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate, in Ollama's form."""

    unsupported: ClassVar[bodies.Values] = {
        "suffix": ("",),
        "template": ("",),
        "images": ([],),
        "context": ([],),
        "tools": ([],),
        "tool_choice": ("",),
    }

    prompt: str | None = Field(None, description="Without a prompt, the answer says that the model is loaded.")
    system: str | None = None
    raw: bool | None = Field(None, description="true: without the chat template.")


class OllamaEmbeddingsBody(bodies.EncoderBody):
    """POST /api/embeddings, the older form of /api/embed."""

    prompt: str
    options: dict[str, Any] | None = Field(None, description=UNUSED)
    keep_alive: KeepAlive = Field(None, description=UNUSED)


class OllamaEmbedBody(bodies.EncoderBody):
    """POST /api/embed, in Ollama's form."""

    input: bodies.Prompts
    dimensions: int | None = Field(None, ge=1)
    truncate: Truncate = True
    options: dict[str, Any] | None = Field(None, description=UNUSED)
    keep_alive: KeepAlive = Field(None, description=UNUSED)


class OllamaShowBody(bodies.ModelBody):
    """POST /api/show, in Ollama's form."""

    name: str | None = Field(None, description="Older name of model.")
    verbose: bool | None = Field(None, description=UNUSED)


# Answers


class OllamaFunction(Schema):
    name: str
    arguments: dict[str, Any]


class OllamaCall(Schema):
    function: OllamaFunction


class OllamaMessage(Schema):
    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaPart(Schema, kw_only=True):
    """A part of an answer, or a whole one; the last part has the members from done_reason on. Durations are
    nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    logprobs: list[ChosenLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaPart, kw_only=True):
    message: OllamaMessage


class OllamaText(OllamaPart, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaVectors(Schema, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaVector(Schema):
    embedding: list[float]


class OllamaDetails(Schema, kw_only=True):
    format: str = "arrow"
    family: str
    families: list[str]
    parent_model: str = ""
    parameter_size: str
    quantization_level: str


class OllamaModel(Schema, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Schema):
    models: list[OllamaModel]


class OllamaShown(Schema, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Schema):
    version: str
    archerfish: str


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(EventWriter):
    """The answer to a chat or a prompt, whole or in lines."""

    headers = LINE_HEADERS
    keep_alive = b""  # clients read every line as JSON

    def __init__(self, model: str, generation: gen.Generation | None, *, is_chat: bool) -> None:
        """generation: None for a request that only loads the model."""
        self._model = model
        self._generation = generation
        self._is_chat = is_chat
        self._began = time.perf_counter_ns()

    def part(
        self, text: str, thinking: str = "", calls: Sequence[gen.PendingCall] = (), logprobs: Any = None
    ) -> OllamaChat | OllamaText:
        head: dict[str, Any] = {"model": self._model, "created_at": now()}
        if self._generation is not None and logprobs:
            head["logprobs"] = self._generation.chosen_logprobs(logprobs)
        if not self._is_chat:
            return OllamaText(**head, response=text, thinking=thinking or UNSET)
        message = OllamaMessage(text, thinking=thinking or UNSET)
        if calls:
            message.tool_calls = [OllamaCall(OllamaFunction(call.name, call.read_arguments())) for call in calls]
        return OllamaChat(**head, message=message)

    def finish(self, last: OllamaChat | OllamaText) -> OllamaChat | OllamaText:
        """Fill the members of the last part."""
        last.done, last.done_reason = True, "load"
        if self._generation is None:
            return last
        [choice], times = self._generation.choices, self._generation.metrics
        last.done_reason = "stop" if choice.finish_reason == "stop" else "length"
        last.total_duration, last.load_duration = time.perf_counter_ns() - self._began, 0
        last.prompt_eval_count, last.eval_count = len(self._generation.prompt_ids), len(choice.token_ids)
        last.prompt_eval_duration = int(times.get("prefill_ms", 0.0) * 1e6)
        last.eval_duration = int(times.get("decode_ms", 0.0) * 1e6) or last.total_duration
        return last

    def whole(self) -> OllamaChat | OllamaText:
        if self._generation is None:
            return self.finish(self.part(""))
        [choice] = self._generation.choices
        return self.finish(self.part(choice.text, choice.reasoning, choice.calls, choice.logprobs))

    def delta(self, delta: gen.ChoiceDelta) -> bytes:
        text, thinking = (
            "".join(part.text for part in delta.parts if part.kind == kind) for kind in ("text", "reasoning")
        )
        return line(self.part(text, thinking, logprobs=delta.logprobs)) if text or thinking or delta.logprobs else b""

    def end(self) -> bytes:
        assert self._generation is not None
        [choice] = self._generation.choices
        calls = line(self.part("", calls=choice.calls)) if choice.calls else b""
        return calls + line(self.finish(self.part("")))

    def error(self, error: Exception) -> bytes:
        return line(failure_body(error, "/api/"))


def line(data: Any) -> bytes:
    return encode_json(data) + b"\n"


# Routes


class OllamaRoutes:
    """Ollama's routes over the services of the other routes."""

    def __init__(self, service: gen.TextService, vectors: VectorRoutes) -> None:
        self.service, self.vectors = service, vectors
        self.catalog: Catalog = service.catalog
        self.routes = [
            BodyRoute("/api/chat", self.chat, OllamaChatBody, OllamaChat, [OllamaChat, PlainError], LINES),
            BodyRoute("/api/generate", self.generate, OllamaGenerateBody, OllamaText, [OllamaText, PlainError], LINES),
            BodyRoute("/api/embed", self.embed, OllamaEmbedBody, OllamaVectors),
            BodyRoute("/api/embeddings", self.embeddings, OllamaEmbeddingsBody, OllamaVector),
            BodyRoute("/api/show", self.show, OllamaShowBody, OllamaShown),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.running),
            Route("/api/version", self.version),
        ]

    async def chat(self, request: Request, body: OllamaChatBody) -> ASGIApp:
        """The next message of a conversation."""
        if not body.messages:
            return await self._loaded(request, body, is_chat=True)
        return await self._answer(
            request, body, await self.service.prepare_chat(request, body, body.messages), is_chat=True
        )

    async def generate(self, request: Request, body: OllamaGenerateBody) -> ASGIApp:
        """The answer to a prompt, or with `raw` and for a model without a chat template, its continuation."""
        if not body.prompt:
            return await self._loaded(request, body, is_chat=False)
        text = await self.catalog.find_text(body.model, "generation", request=request)
        if body.raw or not await has_template(text):
            if body.think:
                request.state.remarks.append(bodies.without_effect("think"))
            values, names = body.sampling()
            params = gen.checked_params(values, text.card, names)
            token_ids = await text.encode(body.prompt, "prompt", is_answered=True)
            generation = self.service.prepare(request, body, text, token_ids, params, names["grammar"])
        else:
            messages = [{"role": "system", "content": body.system}] if body.system else []
            messages.append({"role": "user", "content": body.prompt})
            generation = await self.service.prepare_chat(request, body, messages, "prompt")
        return await self._answer(request, body, generation, is_chat=False)

    async def _loaded(self, request: Request, body: OllamaBody, *, is_chat: bool) -> Response:
        card = await self.catalog.find(body.model, "generation", request=request)
        values, names = body.sampling()
        gen.checked_params(values, card, names)
        return json_response(OllamaAnswer(body.model or card.id, None, is_chat=is_chat).whole())

    async def _answer(
        self, request: Request, body: OllamaBody, generation: gen.Generation, *, is_chat: bool
    ) -> ASGIApp:
        answer = OllamaAnswer(body.model or generation.text.card.id, generation, is_chat=is_chat)
        if body.stream is not False:
            return EventStream(self.service, request, [generation], answer)
        await self.service.complete(request, generation)
        return json_response(answer.whole())

    async def embed(self, request: Request, body: OllamaEmbedBody) -> Response:
        """Vectors of texts."""
        began = time.perf_counter_ns()
        card, rows, usage = await self.vectors.vectors(
            request, body.model, body.input, dimensions=body.dimensions, truncate=body.truncate
        )
        shown: Any = await encode_items(row.tolist() for row in rows)
        total, count = time.perf_counter_ns() - began, usage.prompt_tokens
        name = body.model or card.id
        return json_response(OllamaVectors(model=name, embeddings=shown, total_duration=total, prompt_eval_count=count))

    async def embeddings(self, request: Request, body: OllamaEmbeddingsBody) -> Response:
        """The vector of a text."""
        _, rows, _ = await self.vectors.vectors(request, body.model, [body.prompt], param="prompt")
        return json_response(OllamaVector(rows[0].tolist()))

    async def tags(self, request: Request) -> Response:
        """The models that are served."""
        return json_response(OllamaModels([describe(card, self._started()) for card in await self.catalog.cards()]))

    async def running(self, request: Request) -> Response:
        """The models that are served, with the length of their context."""
        models = [describe(card, self._started()) for card in await self.catalog.cards()]
        for model, card in zip(models, await self.catalog.cards(), strict=True):
            model.expires_at = NEVER
            model.size_vram = 0
            model.context_length = card.max_length
        return json_response(OllamaModels(models))

    async def show(self, request: Request, body: OllamaShowBody) -> Response:
        """What is known of a model."""
        card = await self.catalog.find(
            body.model or body.name, "generation", "embedding", "cross-encoder", request=request
        )
        template, capabilities = "", ["embedding"] if card.kind == "embedding" else []
        if card.kind == "generation":
            text, capabilities = await self.catalog.text_of(card), ["completion"]
            if await has_template(text):
                template = text.template.get().sources.get("default", "")
                capabilities += ["tools", "thinking"] if text.has_reasoning else ["tools"]
        config, details = read_metadata(card.directory).get("config") or {}, describe(card, "").details
        family = details.family
        info = {
            "general.architecture": family,
            "general.basename": card.id,
            f"{family}.context_length": card.max_length,
        }
        if width := card.dimension or config.get("hidden_size"):
            info[f"{family}.embedding_length"] = width
        return json_response(
            OllamaShown(
                template=template,
                details=details,
                model_info=info,
                capabilities=capabilities,
                modified_at=self._started(),
            )
        )

    async def version(self, request: Request) -> Response:
        """The version of Ollama's API that these routes follow, and that of archerfish."""
        return json_response(OllamaVersion(API_VERSION, __version__))

    def _started(self) -> str:
        return datetime.fromtimestamp(self.catalog.started_at, UTC).isoformat().replace("+00:00", "Z")


async def has_template(text: ModelText) -> bool:
    try:
        await asyncio.to_thread(text.template.get)
    except UnsupportedModelError:
        return False
    return True


def describe(card: ModelCard, modified_at: str) -> OllamaModel:
    metadata = read_metadata(card.directory)
    num_parameters = int(metadata.get("total_parameters") or 0)
    size = sum(path.stat().st_size for path in Path(card.directory).glob("weights.arrow")) if card.directory else 0
    family = str((metadata.get("config") or {}).get("model_type") or card.kind)
    details = OllamaDetails(
        family=family,
        families=[family],
        parameter_size=f"{num_parameters / 1e6:.0f}M" if num_parameters else "",
        quantization_level=str(metadata.get("dtype") or ""),
    )
    digest = hashlib.sha256(card.id.encode()).hexdigest()
    return OllamaModel(name=card.id, model=card.id, modified_at=modified_at, size=size, digest=digest, details=details)
