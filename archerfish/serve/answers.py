"""What the routes answer: the types that they fill. The OpenAPI document states the same types (openapi.py)."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from archerfish.serve.errors import Schema


class GeneratedAnswer(Schema, kw_only=True):
    """What most answers of OpenAI's and vLLM's APIs begin with."""

    id: str
    object: str
    created: int
    model: str


# OpenAI: chat and completions


class CachedTokens(Schema):
    cached_tokens: int


class Usage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class FunctionCall(Schema, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(Schema, kw_only=True):
    """A call of a tool; in a stream the first event of a call has all members, later ones more of its arguments."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(Schema, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TokenLogprob(Schema):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Schema):
    content: list[ChosenLogprob]
    refusal: None = None


OpenAIFinish = Literal["stop", "length", "tool_calls"]
StopReason = str | int | None  # the string or token that ended a choice, or "deadline"
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class ChatChoice(Schema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinish
    stop_reason: StopReason


class ChatCompletion(GeneratedAnswer, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Schema):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Schema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: OpenAIFinish | None = None
    stop_reason: StopReason | UnsetType = UNSET


class ChatChunk(GeneratedAnswer, kw_only=True):
    """An event of a chat completion; the last one has usage and no choices."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ListedLogprobs(Schema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Schema):
    index: int
    text: str
    logprobs: ListedLogprobs | None = None
    finish_reason: OpenAIFinish | None = None  # null in events before the last one of a choice
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(GeneratedAnswer, kw_only=True):
    """A completion, or an event of one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# OpenAI: responses

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(Schema, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChosenLogprob] = field(default_factory=list)


class MessageItem(Schema, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart] = field(default_factory=list)


class FunctionCallItem(Schema, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningText(Schema, tag_field="type", tag="reasoning_text"):
    text: str = ""


class ReasoningItem(Schema, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: ItemStatus
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class InputTokensDetails(CachedTokens):
    cache_write_tokens: int = 0


class OutputTokensDetails(Schema):
    reasoning_tokens: int = 0


class ResponseUsage(Schema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Schema):
    code: str
    message: str


class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Schema, kw_only=True):
    """A response; most of its members repeat what the request asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[MessageItem | FunctionCallItem | ReasoningItem] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    metadata: dict[str, Any]
    usage: ResponseUsage | None = None


class ResponseEvent(Schema):
    type: str
    sequence_number: int


class ResponseStatusEvent(ResponseEvent):
    """response.created, .in_progress, .completed, .incomplete and .failed."""

    response: ResponseObject


class OutputItemEvent(ResponseEvent):
    """response.output_item.added and .done."""

    output_index: int
    item: MessageItem | FunctionCallItem | ReasoningItem


class ItemMemberEvent(ResponseEvent):
    """What happens inside of one item, named by type: a part or arguments are added, grow or are done."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    part: OutputTextPart | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChosenLogprob] | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class ResponseErrorEvent(ResponseEvent):
    code: str
    message: str
    param: str | None


RESPONSE_EVENTS = (ResponseStatusEvent, OutputItemEvent, ItemMemberEvent, ResponseErrorEvent)

# Anthropic: messages


class MessageUsage(Schema, kw_only=True):
    """Tokens; those out of the cache are not part of input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Schema, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(Schema, tag_field="type", tag="thinking"):
    """What the model thought; nothing is signed here."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Schema, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


class MessageEnd(Schema):
    """Why a message ended; null in the event that starts one."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None


class MessageObject(Schema, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = field(default_factory=list)
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(Schema, tag_field="type", tag="message_start"):
    message: MessageObject


class ContentBlockStart(Schema, tag_field="type", tag="content_block_start"):
    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class BlockText(Schema, tag_field="type", tag="text_delta"):
    text: str


class BlockThinking(Schema, tag_field="type", tag="thinking_delta"):
    thinking: str


class BlockInput(Schema, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(Schema, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockText | BlockThinking | BlockInput


class ContentBlockStop(Schema, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(Schema, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Schema, tag_field="type", tag="message_stop"):
    """The last event."""


MESSAGE_EVENTS = (MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop)


class TokenCount(Schema):
    input_tokens: int


# Tokens and vectors


class TTSAnswer(GeneratedAnswer, kw_only=True):
    """Speaker (global) and audio (semantic) tokens, from 0 on; 50 semantic tokens are a second of audio."""

    object: Literal["tts.tokens", "tts.tokens.chunk"]
    global_tokens: list[int]
    semantic_tokens: list[int]
    finish_reason: str | None = None  # stop, length or deadline; null in events before the last
    usage: Usage | UnsetType = UNSET


class Tokens(Schema):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Schema):
    prompt: str


class VectorUsage(Schema):
    prompt_tokens: int
    total_tokens: int
    truncated: bool | UnsetType = UNSET  # true: some texts were longer than the model takes, and were cut


class Embedding(Schema, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    truncated: bool | UnsetType = UNSET


class Embeddings(Schema, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: VectorUsage


class DocumentText(Schema):
    text: str


class Ranked(Schema):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(Schema):
    model: str
    results: list[Ranked]
    usage: VectorUsage


class Similarities(Schema):
    similarities: list[float | list[float]]
    model: str
    usage: VectorUsage


# The service itself


class Model(Schema, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["archerfish"] = "archerfish"
    kind: Literal["generation", "tts", "embedding", "cross-encoder"]
    max_length: int
    dimension: int | UnsetType = UNSET
    default_sampling: dict[str, Any] | UnsetType = UNSET
    root: str | UnsetType = UNSET  # the model that this is another name of; of an adapter, its path
    parent: str | UnsetType = UNSET  # of an adapter: its model


class Models(Schema, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class AdapterChanged(Schema, kw_only=True):
    status: Literal["loaded", "unloaded"]
    lora_name: str
    root: str | UnsetType = UNSET  # its path
    rank: int | UnsetType = UNSET


class Version(Schema):
    version: str
    commit: str  # empty: unknown
    instructions: str  # of the native kernels; empty: they were not compiled
    torch: str  # empty: it is not installed
    python: str
    system: str


class Health(Schema, kw_only=True):
    status: Literal["ok"] = "ok"
    seconds: float
    failing: dict[str, str] | UnsetType = UNSET  # replicas, with the reasons; at least one works


class Restarting(Schema, kw_only=True):
    status: Literal["restarting"] = "restarting"
    replicas: int


class Failing(Schema, kw_only=True):
    status: Literal["failing"] = "failing"
    reason: str
