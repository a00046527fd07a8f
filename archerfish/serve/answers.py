"""What the routes answer, as the OpenAPI document states it. Answers are written by hand elsewhere; tests hold them to this."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from archerfish.serve.errors import is_anthropic

PREFIX = "#/components/schemas/"
SENTENCES = {
    400: "Something about the request is wrong: the message says what.", 401: "There is no key, or one that is not known.",
    403: "The key is not an operator's.", 404: "There is no such model.", 413: "The request is too large.",
    429: "Too much at once; Retry-After says when to try again.",
    503: "The engine process does not answer or takes no more; Retry-After says when to try again.",
    504: "The deadline of the request passed before its first token.",
}  # fmt: skip
WRITING = (400, 401, 404, 413, 429, 503, 504)  # errors of routes that generate
COMPUTING = (400, 401, 404, 413, 429, 503)
OPERATING = (400, 401, 403, 404, 413, 503)
LOOKING = (401, 503)


class Stated(BaseModel):
    """Base of all: no members but these."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Stated):
    message: str
    type: str
    param: str | None
    code: str


class Error(Stated):
    """OpenAI's."""

    error: ErrorDetail


class AnthropicErrorDetail(Stated):
    type: str
    message: str


class AnthropicError(Stated):
    """Anthropic's."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class CachedTokens(Stated):
    cached_tokens: int


class Usage(Stated):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class FunctionCall(Stated):
    name: str
    arguments: str


class ToolCall(Stated):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Stated):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class TokenLogprob(Stated):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Stated):
    content: list[ChosenLogprob]
    refusal: None


class Ending(Stated):
    """Why a choice ended; stop_reason: the string or token that it ended on, or "deadline"."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatChoice(Ending):
    message: ChatMessage
    logprobs: ChatLogprobs | None


PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class ChatCompletion(Stated):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []


class ListedLogprobs(Stated):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ending):
    text: str
    logprobs: ListedLogprobs | None
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []


class Completion(Stated):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class WrittenResponse(BaseModel):
    """A response; what it repeats of its request is left out here."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class MessageUsage(Stated):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Stated):
    type: Literal["text"]
    text: str


class ToolUseBlock(Stated):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class WrittenMessage(Stated):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Stated):
    input_tokens: int


class VectorUsage(Stated):
    prompt_tokens: int
    total_tokens: int


class Embedding(Stated):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Stated):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class RankedText(Stated):
    text: str


class Ranked(Stated):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Stated):
    model: str
    results: list[Ranked]
    usage: VectorUsage


class Similarities(Stated):
    similarities: list[float] | list[list[float]]
    model: str
    usage: VectorUsage


class Tokens(Stated):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Stated):
    prompt: str


class TTSTokens(Stated):
    """Numbers from 0 on; 50 semantic tokens are a second of audio."""

    id: str
    object: Literal["tts.tokens"]
    created: int
    model: str
    global_tokens: list[int]
    semantic_tokens: list[int]
    finish_reason: Literal["stop", "length", "deadline"]
    usage: Usage


class Explanation(BaseModel):
    """What the cache says of a prompt."""

    model: str


class Model(Stated):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: Literal["generation", "tts", "embedding", "cross-encoder"]
    max_length: int
    dimension: int = 0


class Models(Stated):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok"]
    seconds: float


class Failing(BaseModel):
    status: Literal["failing"]
    reason: str


class Figures(BaseModel):
    """Figures by name."""


class Options(BaseModel):
    """Options by name."""


TEXT = "text/plain; version=0.0.4; charset=utf-8"
STRING = {"type": "string"}
EVENT = {"type": "object", "properties": {"event": STRING, "data": STRING}, "required": ["data"]}
STREAMED = {"chat/completions", "completions", "responses", "messages", "tts/tokens"}
# By method and path: what a success looks like (a media type where it is no JSON), and which errors there are.
ANSWERS: dict[tuple[str, str], tuple[type[BaseModel] | str, tuple[int, ...]]] = {
    ("post", "/v1/chat/completions"): (ChatCompletion, WRITING), ("post", "/v1/completions"): (Completion, WRITING),
    ("post", "/v1/responses"): (WrittenResponse, WRITING), ("post", "/v1/messages"): (WrittenMessage, WRITING),
    ("post", "/v1/messages/count_tokens"): (TokenCount, COMPUTING), ("post", "/v1/embeddings"): (Embeddings, COMPUTING),
    ("post", "/v1/rerank"): (Ranking, COMPUTING), ("post", "/similarity"): (Similarities, COMPUTING),
    ("post", "/tokenize"): (Tokens, COMPUTING), ("post", "/detokenize"): (Detokenized, COMPUTING),
    ("post", "/v1/tts/tokens"): (TTSTokens, WRITING),
    ("post", "/v1/cache/explain"): (Explanation, COMPUTING), ("get", "/v1/models"): (Models, LOOKING),
    ("get", "/v1/models/{model_id}"): (Model, (401, 404, 503)), ("get", "/health"): (Health, ()),
    ("get", "/ready"): (Health, ()),
    ("get", "/stats"): (Figures, (401, 403, 503)), ("get", "/metrics"): (TEXT, (401, 403, 503)),
    ("get", "/admin/optimization"): (Options, OPERATING), ("patch", "/admin/optimization"): (Options, OPERATING),
}  # fmt: skip


def state_answers(app: FastAPI) -> None:
    """Make the OpenAPI document of an app say what its routes answer."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    operation["responses"] = responses(method, path)
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):  # which FastAPI supposes, but nobody answers
                schemas.pop(name, None)
            schemas.update(stated_schemas())
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def stated_schemas() -> dict[str, Any]:
    models: list[type[BaseModel]] = [Error, AnthropicError, Failing]
    for answer, _ in ANSWERS.values():
        if not isinstance(answer, str) and answer not in models:
            models.append(answer)
    _, stated = models_json_schema([(model, "serialization") for model in models], ref_template=PREFIX + "{model}")
    schemas: dict[str, Any] = stated["$defs"]
    return schemas


def responses(method: str, path: str) -> dict[str, Any]:
    """Of one operation, as the document has them."""
    answer, statuses = ANSWERS[method, path]
    content: dict[str, Any] = {answer: {"schema": STRING}} if isinstance(answer, str) else of_schema(answer)
    if method == "post" and path.removeprefix("/v1/") in STREAMED:
        content["text/event-stream"] = {"schema": EVENT}
    found: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    error = of_schema(AnthropicError if is_anthropic(path) else Error)
    for status in statuses:
        found[str(status)] = {"description": SENTENCES[status], "content": error}
    if answer is Health:
        found["503"] = {"description": "No computation succeeds now.", "content": of_schema(Failing)}
    return found


def of_schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": PREFIX + model.__name__}}}
