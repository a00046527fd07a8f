"""Results of requests, pieces of results, and statistics of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from archerfish.cache.radix import CacheStats
from archerfish.params import SamplingParams
from archerfish.sched.live import SchedulerStats
from archerfish.sequence import Delta, FinishReason, Request
from archerfish.sequence import Sequence as TokenSequence
from archerfish.step import TokenLogprobs
from archerfish.text.output_text import OutputText
from archerfish.text.reasoning import answer_parser
from archerfish.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from archerfish.engine.llm_engine import LLMEngine


@dataclass(slots=True)
class CompletionOutput:
    """One of the n texts of a request.

    cumulative_logprob is the log-probability of all its tokens together. Like logprobs it is None unless the request
    asks for logprobs (`SamplingParams(logprobs=0)` is enough), because it costs a pass over the vocabulary for every
    token.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # the token that ended it included
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the token that ended it
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: BaseException | None = None
    reasoning_content: str | None = None  # of `chat`, for models that reason: what stands between <think> and </think>
    content: str | None = None  # of `chat`: the text without it


@dataclass(slots=True)
class RequestMetrics:
    """Durations of a request: queue, prefill (until the first token) and decode (from the first token to the end)."""

    arrival: float = 0.0  # on the scheduler's clock, in seconds
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    ttft_ms: float = 0.0  # from arrival to the first token
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    tokens_per_second: float = 0.0  # output tokens per second of prefill and decode
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # that speculation proposed
    num_accepted_tokens: int = 0  # of these


def request_metrics(sequences: Sequence[TokenSequence]) -> RequestMetrics:
    """The metrics of a request, from the first arrival of its sequences to their last end."""
    times = [sequence.times for sequence in sequences]
    arrived = min((moment.arrived for moment in times), default=0.0)
    finished = max((moment.finished for moment in times), default=0.0)
    # A sequence that never ran was only in the queue; one without a token was only in queue and prefill.
    admitted = min((moment.admitted for moment in times if moment.admitted), default=finished)
    first_token = min((moment.first_token for moment in times if moment.first_token), default=finished)
    num_output = sum(len(sequence.tokens) - sequence.num_prompt for sequence in sequences)
    running_s = finished - admitted
    return RequestMetrics(
        arrival=arrived,
        queue_ms=(admitted - arrived) * 1000,
        prefill_ms=(first_token - admitted) * 1000,
        decode_ms=(finished - first_token) * 1000,
        ttft_ms=(first_token - arrived) * 1000,
        num_prompt_tokens=sequences[0].num_prompt if sequences else 0,
        num_output_tokens=num_output,
        tokens_per_second=num_output / running_s if running_s > 0 else 0.0,
        num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
        num_draft_tokens=sum(sequence.draft.num_proposed for sequence in sequences if sequence.draft is not None),
        num_accepted_tokens=sum(sequence.draft.num_accepted for sequence in sequences if sequence.draft is not None),
    )


@dataclass(slots=True)
class RequestOutput:
    """The result of a request. Properties such as text and token_ids are those of its first output."""

    request_id: str
    prompt: str | None  # None where the caller gave token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # tokens of the prompt that were in the cache
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    finished: bool = True
    hit: Any = None  # the HitRecord: where the match in the cache ended, and why
    prompt_logprobs: list[TokenLogprobs] | None = None  # of all prompt tokens but the first
    logits: Any = None  # with wants_logits: a read-only (1, vocabulary) tensor of the token after the prompt

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs


def split_reasoning(
    engine: LLMEngine, results: list[RequestOutput], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """The answers to conversations with their reasoning_content and content. `text` stays whole, as in vLLM."""
    for result, one in zip(results, params, strict=True):
        for output in result.outputs:
            found = answer_parser(engine.tokenizer, engine.chat_template, result.prompt_token_ids)
            parser = None if one.grammar else found  # a grammar holds from the first token
            output.reasoning_content, output.content = parser.feed(output.text, True) if parser else (None, output.text)
    return results


@dataclass(slots=True)
class PoolingOutput:
    """A row of numbers of an encoder, under the names that vLLM gives it."""

    data: Any  # a float32 array: a vector, a score, or one probability for each label

    @property
    def embedding(self) -> list[float]:
        return self.probs

    @property
    def probs(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def score(self) -> float:
        return float(self.data.item())


@dataclass(slots=True)
class PoolingRequestOutput:
    """The result of LLM.embed, encode, score or classify for one input."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class TextDelta:
    """New text and tokens of one output of a request, as `stream` yields them."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    output: RequestOutput | None = None  # the whole result, with the last delta of a request
    stop_reason: str | int | None = None  # with a finish_reason


Listener = Callable[[TextDelta], None]
Watcher = Callable[[Delta, RequestOutput | None], None]  # the result comes with the last delta of a request


class OutputCollector:
    """Collects the tokens and the text of a request while it runs, and holds its result when it is done."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        listener: Listener | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        n = request.params.n
        self.request_id = request.request_id
        self.prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids
        self._stop_token_ids = request.stop_token_ids
        self.is_kept = is_kept  # whether the engine keeps the result for `get_output`
        self.listener = listener
        self.outputs = [CompletionOutput(index) for index in range(n)]
        self.has_text = tokenizer is not None and not request.params.stages  # tokens of stages stand for no text
        self.texts: list[OutputText | None] = [
            OutputText(tokenizer, request.prompt_token_ids, request.params) if self.has_text else None for _ in range(n)
        ]
        self._pieces: list[list[str]] = [[] for _ in range(n)]  # of each output's text
        self.prompt_logprobs: list[TokenLogprobs] | None = None if request.params.prompt_logprobs is None else []
        self.logits: Any = None
        self.sequences: dict[int, TokenSequence] = {}
        self.num_open = n
        self.result: RequestOutput | None = None

    def add(self, delta: Delta) -> bool:
        """Add what a step brought; true when a stop string was found, so that the sequence must be ended."""
        index, reason = delta.sequence.index, delta.finish_reason
        self.sequences[index] = delta.sequence
        output, text = self.outputs[index], self.texts[index]
        if delta.prompt_logprobs and self.prompt_logprobs is not None and index == 0:
            self.prompt_logprobs += delta.prompt_logprobs
        if delta.logits is not None:
            self.logits = delta.logits
        shown = ""
        token_ids = delta.token_ids
        logprobs = delta.logprobs
        stop = None
        if output.stop_reason is not None:
            token_ids, logprobs = [], None
        elif text is not None:
            shown, stop = text.feed(token_ids, reason, self._stop_token_ids)
            output.stop_reason = stop
            self._pieces[index].append(shown)
        output.token_ids += token_ids
        if logprobs is not None:
            output.logprobs = [] if output.logprobs is None else output.logprobs
            output.logprobs += logprobs
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(item.logprob for item in logprobs)
        if reason is not None:
            output.error, output.text = delta.error, "".join(self._pieces[index])
            output.finish_reason = (
                reason if output.stop_reason is None else "stop"
            )  # a stop string that was found earlier
            ends = self._stop_token_ids
            if output.stop_reason is None and reason == "stop" and output.token_ids and output.token_ids[-1] in ends:
                output.stop_reason = output.token_ids[-1]
            self.num_open -= 1
        if reason is not None and self.num_open == 0:
            first = self.sequences[0]
            self.result = RequestOutput(
                request_id=self.request_id,
                prompt=self.prompt,
                prompt_token_ids=list(self._prompt_token_ids),
                outputs=self.outputs,
                num_cached_tokens=first.num_cached,
                hit=first.hit,
                prompt_logprobs=self.prompt_logprobs,
                logits=self.logits,
                metrics=request_metrics(list(self.sequences.values())),
            )
        if self.listener is not None and (shown or token_ids or reason is not None):
            stop_reason = output.stop_reason if reason is not None else None
            self.listener(
                TextDelta(
                    self.request_id, index, shown, token_ids, output.finish_reason, logprobs, self.result, stop_reason
                )
            )
        if (
            self.result is not None
        ):  # else its sequences, which know their request, would keep it until a garbage collection
            self.sequences = {}
            self.texts = []
            self.listener = None
        return stop is not None and reason is None


@dataclass(slots=True)
class EngineStats(SchedulerStats):
    """Counts since an engine was made, its current state, and (MEANS) times of a sequence on average."""

    cache_hits: int = 0  # prompt tokens that were in the cache
    cache_misses: int = 0

    @classmethod
    def of(cls, counted: SchedulerStats, cache: CacheStats) -> Self:
        return cls(**asdict(counted), cache_hits=cache.hits, cache_misses=cache.misses)


MEANS = ("avg_queue_time_ms", "avg_prefill_time_ms", "avg_decode_time_ms")


def engine_counts(engine: LLMEngine) -> dict[str, Any]:
    """Counts since the engine was made and its current state, by the names of `observe.metrics`."""
    scheduler = engine.scheduler
    stats = engine.engine_stats()
    cached = engine.cache_stats()
    logits = engine.logits_cache.get_stats()
    blocks = scheduler.blocks
    num_used = blocks.num_total - blocks.num_free - scheduler.cache.num_evictable
    return {
        **asdict(stats),
        **{name: getattr(stats, name) for name in MEANS},
        "cache": asdict(cached),
        "num_prompt_tokens": cached.hits + cached.misses,
        "logits_cache_hits": logits.hits,
        "logits_cache_misses": logits.misses,
        "num_blocks": blocks.num_total,
        "num_blocks_in_use": num_used,
        "kv_usage": num_used / blocks.num_total,
        **engine.runner.ops.compile_counts(),
        **({} if scheduler.adapters is None else {"adapter_loads": scheduler.adapters.num_loads}),
        "kv_bytes_held": (blocks.num_total - blocks.num_free) * (engine.facts.memory.num_bytes / blocks.num_total),
    }
