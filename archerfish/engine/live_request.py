"""A request between submission and its end: tokens come in, text goes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archerfish.engine.outputs import CompletionOutput, RequestOutput, TextDelta, request_metrics
from archerfish.sequence import Delta, Request, Sequence, TokenLogprobs
from archerfish.text.output_text import OutputText
from archerfish.text.tokenizer import Tokenizer

Listener = Callable[[TextDelta], None]
Watcher = Callable[[Delta, RequestOutput | None], None]  # the result comes with the last delta of a request


class LiveRequest:
    """What the engine keeps of a request while it runs, and its result when it is done."""

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, listener: Listener | None = None,
        *, is_kept: bool = True,
    ) -> None:
        self.request, self.prompt = request, prompt
        self.is_kept = is_kept  # whether the engine keeps the result until somebody fetches it
        self.listener = listener
        self.outputs = [CompletionOutput(index) for index in range(request.params.n)]
        if request.params.stages:  # whose tokens stand for no text
            tokenizer = None
        self.texts = [
            None if tokenizer is None else OutputText(tokenizer, request.prompt_token_ids, request.params)
            for _ in range(request.params.n)
        ]
        self.prompt_logprobs: list[TokenLogprobs] | None = None if request.params.prompt_logprobs is None else []
        self.logits: Any = None
        self.sequences: dict[int, Sequence] = {}
        self.num_open = request.params.n
        self.result: RequestOutput | None = None

    def take(self, delta: Delta) -> bool:
        """Add what a step brought; true when a stop string was found, so that the sequence must be ended."""
        index = delta.sequence.index
        self.sequences[index] = delta.sequence
        output, text = self.outputs[index], self.texts[index]
        if delta.prompt_logprobs and self.prompt_logprobs is not None and index == 0:
            self.prompt_logprobs += delta.prompt_logprobs
        if delta.logits is not None:
            self.logits = delta.logits
        is_stopped = output.stop_reason is not None
        shown, stop = "", None
        token_ids = [] if is_stopped else delta.token_ids
        if text is not None and not is_stopped:
            shown, stop = text.feed(token_ids, delta.finish_reason, self.request.stop_token_ids)
        logprobs = None if is_stopped else delta.logprobs
        output.add(shown, token_ids, logprobs)
        if stop is not None:
            output.stop_reason = stop
        if delta.finish_reason is not None:
            output.finish(delta)
            self.num_open -= 1
        if self.num_open == 0:
            self.result = self._finish()
        if self.listener is not None and (shown or token_ids or delta.finish_reason is not None):
            reason = output.finish_reason if delta.finish_reason is not None else None
            stop_reason = output.stop_reason if reason is not None else None
            self.listener(
                TextDelta(self.request.request_id, index, shown, token_ids, reason, logprobs, self.result, stop_reason)
            )
        return stop is not None and delta.finish_reason is None

    @property
    def has_text(self) -> bool:
        return self.texts[0] is not None

    def give_up_text(self) -> None:
        """Go on with ids alone: the text of these tokens could not be made."""
        self.texts = [None] * len(self.texts)

    def _finish(self) -> RequestOutput:
        first = self.sequences[0]
        return RequestOutput(
            request_id=self.request.request_id, prompt=self.prompt, prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=self.outputs, num_cached_tokens=first.num_cached, hit=first.hit, prompt_logprobs=self.prompt_logprobs,
            logits=self.logits, metrics=request_metrics(list(self.sequences.values())),
        )
