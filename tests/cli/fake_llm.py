"""An LLMEngine without a model, as `generate` and `chat` use it: it answers with the words of its last message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from archerfish.cache.tree import HitRecord
from archerfish.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TextDelta
from archerfish.params import SamplingParams
from archerfish.text.chat_template import ChatTemplate


class FakeLLM:
    """`on_word` is called before every word of a stream and before every prompt of several, which end in reverse order.

    `num_aborted` and `is_closed` record how streams and the engine ended.
    """

    model_name = "fake/llm"

    def __init__(self, on_word: Callable[[int], None] | None = None) -> None:
        self.on_word = on_word or (lambda number: None)
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.num_aborted = 0
        self.is_closed = False
        self.models: list[str] = []  # names with which it was opened
        self.adapters: list[Any] = []  # of requests
        self.facts = SimpleNamespace(default_sampling={})
        self.error: Exception | None = None
        self.tokenizer: Any = None
        self.reply = ""  # in place of the last message's words
        self.chat_template = ChatTemplate("")

    def generate(
        self,
        prompts: Sequence[str],
        params: SamplingParams,
        *,
        show_progress: bool = False,
        on_result: Callable[[int, RequestOutput], None] = lambda place, result: None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        self.adapters.append(lora_request)
        results: dict[int, RequestOutput] = {}
        for place in reversed(range(len(prompts))):
            self.on_word(place)
            results[place] = self._result(prompts[place], params)
            on_result(place, results[place])
        return [results[place] for place in range(len(prompts))]

    def stream(self, prompt: str, params: SamplingParams, lora_request: Any = None) -> Iterator[TextDelta]:
        self.adapters.append(lora_request)
        if self.error is not None:
            raise self.error
        result = self._result(prompt, params)
        words = result.text.split(" ")
        is_done = False
        try:
            for number, word in enumerate(words):
                self.on_word(number)
                is_last = is_done = number == len(words) - 1
                text = word if is_last else f"{word} "
                yield TextDelta("r", 0, text, [number], "stop" if is_last else None, None, result if is_last else None)
        finally:
            self.num_aborted += not is_done

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        self.prompts.append([dict(message) for message in messages])
        return str(messages[-1]["content"])

    def _result(self, prompt: str, params: SamplingParams) -> RequestOutput:
        self.params.append(params)
        text = self.reply or f"echo {prompt}"
        outputs = [CompletionOutput(i, text, list(range(len(text.split()))), "stop") for i in range(params.n)]
        ids = list(range(len(prompt.split())))
        return RequestOutput(
            "r",
            prompt,
            ids,
            outputs,
            num_cached_tokens=1,
            metrics=RequestMetrics(ttft_ms=12.0, num_prompt_tokens=len(ids)),
            hit=HitRecord(len(ids), 1, "never_seen"),
        )

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True
