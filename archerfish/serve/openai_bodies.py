"""Bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from archerfish.params import MAX_LOGPROBS, MAX_N
from archerfish.serve.bodies import (
    IGNORED,
    UNUSED,
    Body,
    ConversationBody,
    Messages,
    Prompts,
    Stop,
    TextBody,
    Values,
    bounded,
)  # fmt: skip
from archerfish.serve.errors import InvalidParameterError, UnsupportedParameterError

RESERVED = ("self", "tokenizer", "messages", "tools")  # names that chat_template_kwargs cannot have


class StreamOptions(Body):
    """stream_options."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="With include_usage: usage so far in every event, as in vLLM.")
    include_obfuscation: bool = Field(False, description=UNUSED)


class ChoicesBody(TextBody):
    """What chat and completions have in common."""

    n: int | None = bounded(minimum=1, maximum=MAX_N)
    stop: Stop = None
    prompt_logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = Field(None, description="Begin with the prompt; in a chat, with a last message of the assistant.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only so many tokens of the prompt, the last; -1: as many as fit."
    )

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("stream_options is for streams; set stream to true.", "stream_options")
        if self.truncate_prompt_tokens == 0:
            raise InvalidParameterError("truncate_prompt_tokens must be at least 1, or -1.", "truncate_prompt_tokens")
        return super().sampling()

    def num_kept(self, max_length: int, max_tokens: int | None) -> int | None:
        most = max(1, max_length - (max_tokens or 1))
        return most if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class TemplateBody(Body):
    """How a chat template is applied, in vLLM's form."""

    add_generation_prompt: bool | None = Field(None, description="false: do not begin a message of the assistant.")
    continue_final_message: bool = Field(False, description="Go on with the last message, which is the assistant's.")
    add_special_tokens: bool | None = Field(None, description="Put special tokens, such as the beginning's, before it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Values for the chat template.")

    def conversation(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
        """Messages and values for the template, and the text with which the answer begins already."""
        values = dict(self.chat_template_kwargs or {})
        reserved = [name for name in RESERVED if name in values]
        if reserved:
            raise InvalidParameterError(f"chat_template_kwargs cannot hold {reserved[0]!r}.", "chat_template_kwargs")
        if not self.continue_final_message:
            stated = self.add_generation_prompt
            return messages, values if stated is None else {**values, "add_generation_prompt": stated}, ""
        last = messages[-1]
        if self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other; set one to false."
            raise InvalidParameterError(message, "continue_final_message")
        if last["role"] != "assistant" or "tool_calls" in last or len(messages) < 2:
            message = "continue_final_message needs a conversation whose last message is a text of the assistant."
            raise InvalidParameterError(message, "continue_final_message")
        return messages[:-1], values, last["content"]


class ChatBody(TemplateBody, ConversationBody, ChoicesBody):
    """POST /v1/chat/completions, in OpenAI's form."""

    unsupported: ClassVar[Values] = {
        "audio": (), "function_call": (), "functions": (), "modalities": (["text"],), "web_search_options": (), "best_of": (1,),
        "chat_template": (), "use_beam_search": (False,),
    }  # fmt: skip

    ignored: ClassVar[Values] = {**IGNORED, "reasoning": ()}

    messages: Messages
    max_tokens: int | None = bounded(minimum=1)
    max_completion_tokens: int | None = bounded(description="OpenAI's newer name of max_tokens.", minimum=1)
    logprobs: bool | None = None
    reasoning_effort: str | None = Field(None, description="For chat templates that read it; none: without reasoning.")
    include_reasoning: bool = Field(True, description="false: leave reasoning_content out of the answer.")

    def effort(self) -> tuple[str, str]:
        return "reasoning_effort", self.reasoning_effort or ""

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidParameterError("max_tokens and max_completion_tokens differ.", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs to be true.", "top_logprobs")
        values["max_tokens"], names["logprobs"] = next(iter(limits), None), "top_logprobs"
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values, names


class CompletionBody(ChoicesBody):
    """POST /v1/completions, in OpenAI's form."""

    unsupported: ClassVar[Values] = {"best_of": (1,), "suffix": ("",), "use_beam_search": (False,)}

    prompt: Prompts
    max_tokens: int | None = bounded(16, "0, with echo, gives the prompt alone.", minimum=0)
    logprobs: int | None = bounded(minimum=0, maximum=MAX_LOGPROBS)
    return_token_ids: bool = Field(False, description="Give token ids beside the text.")
    add_special_tokens: bool = Field(True, description="Put special tokens, such as the one for the beginning, before a text.")

    def sampling(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, names = super().sampling()
        values["max_tokens"] = self.max_tokens
        if self.max_tokens == 0:
            if not self.echo:
                raise InvalidParameterError("max_tokens is 0, which is only allowed with echo.", "max_tokens")
            values["max_tokens"] = 1  # the least that the engine generates; it is not shown
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo and self.stream:
                raise UnsupportedParameterError("Logprobs of a prompt are not streamed; leave out stream.", "stream")
            if self.echo:
                values.setdefault("prompt_logprobs", self.logprobs)
        return values, names
