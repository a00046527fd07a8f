"""LLM: an LLMEngine with the interface of vLLM's class of that name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from archerfish.engine.llm_engine import LLMEngine, Message, Prompt
from archerfish.engine.outputs import RequestOutput
from archerfish.engine.request_maker import is_token_ids
from archerfish.errors import InvalidInputError
from archerfish.params import SamplingParams
from archerfish.text.tokenizer import Tokenizer


class LLM(LLMEngine):
    """LLM(model="...", **options): an LLMEngine whose `generate` and `chat` have the arguments and results of vLLM's."""

    def generate(
        self, prompts: Prompt | Mapping[str, Any] | Sequence[Prompt | Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool | None = None,
        show_progress: bool = False, **options: Any,
    ) -> list[RequestOutput]:
        """Results of one or more prompts, in their order. use_tqdm is another name of show_progress.

        A prompt may also be a dict with "prompt" or "prompt_token_ids".
        """
        shows = show_progress if use_tqdm is None else bool(use_tqdm)
        plain: Any = [plain_prompt(prompts)] if isinstance(prompts, Mapping) else prompts
        if isinstance(plain, list | tuple) and not is_token_ids(plain):
            plain = [plain_prompt(one) for one in plain]
        return super().generate(plain, sampling_params, show_progress=shows, **options)

    def chat(  # type: ignore[override]  # a list, as in vLLM, also for one conversation
        self, messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool | None = None, *,
        template_options: Mapping[str, Any] | None = None, **options: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation or to several, always as a list."""
        prompts = [self.render_chat(one, **(template_options or {})) for one in conversations(messages)]
        given = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        params = [self.chat_template.stopping(one or self.get_default_sampling_params()) for one in given]
        return self.generate(prompts, params, use_tqdm=use_tqdm, **options)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self.tokenizer is None:
            raise InvalidInputError(f"{self.model_name} has no tokenizer.", hint="Give prompts as lists of token ids.")
        return self.tokenizer


def plain_prompt(prompt: Any) -> Any:
    """The prompt of a vLLM dict; anything else unchanged."""
    if not isinstance(prompt, Mapping):
        return prompt
    known = [prompt[key] for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
    if len(known) != 1 or len(prompt) != 1:
        keys = ", ".join(map(repr, prompt)) or "none"
        raise InvalidInputError(f"A prompt that is a dict has one key, 'prompt' or 'prompt_token_ids', not {keys}.")
    return known[0]


def conversations(messages: Any) -> list[Any]:
    """A list of conversations unchanged; anything else as one conversation, which the template checks."""
    is_many = isinstance(messages, Sequence) and bool(messages) and all(isinstance(one, list | tuple) for one in messages)
    return list(messages) if is_many else [messages]
