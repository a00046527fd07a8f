"""A generation model of an engine process."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from archerfish.config import EngineConfig
from archerfish.engine.adapters import NOT_ENABLED
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.llm_loading import ModelFacts
from archerfish.engine.outputs import (
    OutputCollector,
    RequestMetrics,
    RequestOutput,
    TextDelta,
    engine_counts,
    request_metrics,
)
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.errors import ArcherfishError, InvalidInputError, NotFoundError, StoppedError
from archerfish.params import SamplingParams
from archerfish.route.router import ReplicaLoad
from archerfish.sched.policy import FairShare
from archerfish.sequence import Namespace, Request
from archerfish.serve.adapter_changes import note_changes
from archerfish.serve.compute import Lane, ModelHost, PendingRequest, read_in_thread
from archerfish.serve.history import History
from archerfish.serve.overload import AdmittedRequest, OverloadController, estimate_tokens
from archerfish.serve.tenants import ANONYMOUS, Tenant
from archerfish.serve.wire import ChangeAdapter, Chunk, ExplainRequest, Generated, GenerationRequest, Report, WireOutput
from archerfish.step import TokenLogprobs

PROBE_TENANT = replace(ANONYMOUS, name="\0probe")  # no other tenant can have this name
MAX_INLINE_TOKENS = 8192  # the loop itself reads a prompt of up to so many ids
CPU_GAP_MS, GPU_GAP_MS = 80.0, 30.0
CPU_DECODES_SHARE = 0.2  # a GPU would read its weights for these steps alone
USUAL_TOKENS = 1024  # of a prompt
VIEW_S, MAX_VIEWS = 0.2, 64  # how long a tenant's view is kept, and how many are
RESERVED_TEMPLATE_OPTIONS = ("self", "tokenizer", "messages")
METRICS = (
    "queue_ms",
    "prefill_ms",
    "decode_ms",
    "ttft_ms",
    "tokens_per_second",
    "num_preemptions",
    "num_draft_tokens",
    "num_accepted_tokens",
)

Batch = list[tuple["HostedGeneration", TextDelta]]


class HostedLLM:
    """An LLMEngine that answers requests of an engine process."""

    kind = "generation"

    def __init__(self, engine: LLMEngine, lane: Lane, host: ModelHost) -> None:
        self.engine = engine
        self.lane = lane
        self.host = host
        self.name = engine.model_name
        owner = weakref.proxy(self)  # a cycle of references would keep an unloaded model in memory
        self.controller = OverloadController(
            rates=host.rates,
            expect=lambda request, unread: owner.expect(request, unread),
            max_tokens=engine.facts.max_len,
            max_queued=engine.config.max_queue_size,
            **host.config.admission,
        )
        prompts, is_cpu = engine.scheduler.prompts, engine.facts.device == "cpu"
        prompts.max_gap_s = (host.config.max_gap_ms or (CPU_GAP_MS if is_cpu else GPU_GAP_MS)) / 1000
        prompts.decodes_share = CPU_DECODES_SHARE if is_cpu else 0.0
        self._ids = itertools.count()
        self._tokens_done = (0, 0)
        self._sent_at = math.nan  # when the last step was sent
        self.history = History(host.clock)
        self._views: dict[tuple[str, bool], tuple[float, dict[str, Any]]] = {}  # the last ones, by tenant
        self.is_advancing = False
        self.batches: defaultdict[str, Batch] = defaultdict(
            list
        )  # of the current `advance`, by label of tenants in metrics
        self.read_weights()

    def read_weights(self) -> None:
        """Give a fair-share scheduler the current weights of the tenants."""
        policy = self.engine.scheduler.policy
        if isinstance(policy, FairShare):
            policy.set_weights({tenant.name: tenant.weight for tenant in self.host.callers.tenants.all()})

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def card(self) -> dict[str, Any]:
        facts = self.engine.facts
        memory = {"num_states": facts.memory.num_blocks} if facts.has_states else {"kv_tokens": facts.memory.num_tokens}
        return {
            **card_of(facts, self.engine.config),
            "kind": self.kind,
            "has_tokenizer": self.engine.tokenizer is not None,
            "has_chat_template": self._has_chat_template(),
            **memory,
        }

    def adapters(self) -> dict[str, Any]:
        """The part of the card that changes."""
        library = self.engine.adapters
        if library is None:
            return {}
        cards = [{"name": one.name, "path": one.path, "digest": one.digest} for one in library.list()]
        return {"adapters": cards, "finds_adapters": bool(library.config.lora_dir)}

    def change_adapter(self, request: PendingRequest, message: ChangeAdapter) -> None:
        library = self.engine.adapters
        if library is None:
            raise InvalidInputError(f"{self.name} was started without adapters.", hint=NOT_ENABLED)

        def change() -> Callable[[], None]:
            if message.action == "load":
                found = library.load(message.name, library.allowed_path(message.path), in_place=message.in_place)
            elif message.action == "unload":
                found = library.unload(message.name)
            else:
                found = library.find(message.name)
            if message.action != "find":
                path = found.path if message.action == "load" else ""
                note_changes(self.host.config.adapters_file, self.name, {found.name: path})
            report = Report(request_id=message.request_id, values=asdict(found))
            return partial(self.host.answer, request, report)

        read_in_thread(self.host, request, change, self.host.loader)

    def _has_chat_template(self) -> bool:
        try:
            return self.engine.tokenizer is not None and self.engine.chat_template is not None
        except ArcherfishError:
            return False

    # Requests

    def submit(self, request: PendingRequest) -> None:
        """Accept a GenerationRequest: at once if it has token ids, else after a reader thread has tokenised its
        text."""
        message = request.message
        if isinstance(message, ExplainRequest):
            self._explain(request, message)
            return
        if not isinstance(message, GenerationRequest):
            raise InvalidInputError(f"{self.name} generates text; it has no vectors.", hint="Name an embedding model.")
        try:
            params = SamplingParams.of(message.params)
        except TypeError as error:
            raise InvalidInputError(f"The sampling parameters cannot be read: {error}.") from None
        is_limited = request.on_end is None and self.controller.max_output_tokens
        params, remarks = self._within_limit(params) if is_limited else (params, [])
        ids, has_grammar = message.token_ids, params.grammar is not None
        is_at_hand = self._check_adapter(request.tenant, message.adapter)
        label = self.host.figures.tenant_label(request.tenant.name) if request.on_end is None else ""
        generation = HostedGeneration(self, request, message, params, label, self.batches[label], remarks)
        if request.on_end is None:  # no health check; before any work is spent on the text
            if message.deadline_s is not None and message.deadline_s > 0:
                alone_s = self.engine.scheduler.forecast.alone_s(params.max_tokens)
                self.controller.check_deadline(message.deadline_s, alone_s, " or lower max_tokens")
            texts = [message.prompt or "", *(str(part.get("content", "")) for part in message.messages or ())]
            left_s = request.left_s(self.host.clock())
            arriving = AdmittedRequest(
                request.tenant,
                num_prompt_tokens=estimate_tokens(sum(map(len, texts))) if ids is None else len(ids),
                num_sequences=params.n,
                max_tokens=params.max_tokens,
                priority=min(message.priority, request.tenant.max_priority),
                deadline_s=left_s if left_s and left_s > 0 else None,
            )
            generation.admitted = self.controller.admit(arriving, is_tokenized=ids is not None)
        request.release = generation.release
        if ids is not None and len(ids) <= MAX_INLINE_TOKENS and not has_grammar and is_at_hand:
            self._prepare(generation)()
        else:
            work = partial(self._prepare, generation)
            others = self.host.compiler if has_grammar else None
            read_in_thread(self.host, request, work, others if is_at_hand else self.host.loader)

    def _check_adapter(self, tenant: Tenant, adapter: str) -> bool:
        """Whether an adapter, or none, is loaded; refuses one that the tenant may not use, as if it were not here."""
        if not tenant.may_use(adapter):
            raise NotFoundError(f"There is no adapter {adapter!r}.")
        return not adapter or (self.engine.adapters is not None and self.engine.adapters.is_loaded(adapter))

    def _within_limit(self, params: SamplingParams) -> tuple[SamplingParams, list[str]]:
        """The parameters with max_tokens lowered to the server's limit of all n sequences together, and a remark about
        it.

        The front ends of this server have lowered it already.
        """
        limit, wanted = self.controller.max_output_tokens // params.n, self.controller.max_tokens
        wanted = wanted if params.max_tokens is None else min(params.max_tokens, wanted)
        if not limit or wanted <= limit:
            return params, []
        remark = f"max_tokens was lowered from {params.max_tokens} to {limit}, the limit of this server"
        return params.lowered_to(limit), [] if params.max_tokens is None else [remark]

    def _prepare(self, generation: HostedGeneration) -> Callable[[], None]:
        """Make a request to the engine, in any thread. Returns the function that starts it, for the loop."""
        message = generation.message
        request = generation.request
        params = generation.params
        given = [name for name in ("prompt", "token_ids", "messages") if getattr(message, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise InvalidInputError(f"Give one of prompt, token_ids and messages, not {found}.")
        prompt = message.prompt if message.prompt is not None else message.token_ids
        if message.messages is not None:
            if not self._has_chat_template():
                raise InvalidInputError(f"{self.name} has no chat template.", hint="Send prompt or token_ids.")
            reserved = [name for name in RESERVED_TEMPLATE_OPTIONS if name in message.template_options]
            if reserved:
                raise InvalidInputError(f"A chat template has no option {reserved[0]!r}.")
            prompt = self.engine.render_chat(message.messages, **message.template_options)
            params = self.engine.chat_template.stopping(params)
        assert prompt is not None
        live = self.engine.requests.make(
            prompt,
            params,
            listener=generation.on_delta,
            wants_text=not message.wants_ids,
            request_id=f"host-{next(self._ids)}",
            priority=min(message.priority, request.tenant.max_priority),
            namespace=Namespace(request.tenant.name),
            deadline_s=request.left_s(self.host.clock()),
            adapter=message.adapter,
        )
        return partial(self._start, live, generation)

    def _start(self, live: Request, generation: HostedGeneration) -> None:
        admitted = generation.admitted
        if admitted is not None and generation.message.token_ids is None:  # the length was estimated
            self.controller.set_prompt_tokens(admitted, len(live.prompt_token_ids))
        self.engine.submit(live)
        if admitted is not None:
            self.controller.enter(admitted)
        if generation.message.adapter:
            self.host.figures.adapter_request(self.name, generation.message.adapter)
        generation.live = live
        generation.is_sent_by_loop = not live.collector.has_text
        generation.request.end_sequence = partial(self.engine.abort, live.request_id)

    def probe(self, request: PendingRequest) -> None:
        """Answer after a real step: one token for a prompt that no cache holds."""
        vocab_size, number = self.engine.facts.vocab_size, next(self._ids)
        prompt = [number % vocab_size, number // vocab_size % vocab_size]
        params = {"max_tokens": 1, "temperature": 0.0}
        request.message = GenerationRequest(request_id="", token_ids=prompt, params=params, wants_ids=True)
        request.tenant = PROBE_TENANT
        self.submit(request)

    def _explain(self, request: PendingRequest, message: ExplainRequest) -> None:
        prompt, adapter = message.prompt if message.prompt is not None else message.token_ids, message.adapter
        is_at_hand = self._check_adapter(request.tenant, adapter)
        if prompt is None or (message.prompt is not None and message.token_ids is not None):
            raise InvalidInputError("Give one of prompt and token_ids.")

        def read() -> Callable[[], None]:
            record = self.engine.explain(prompt, Namespace(request.tenant.name), adapter)
            report = Report(request_id=message.request_id, values={**asdict(record), "text": record.explain()})
            return partial(self.host.answer, request, report)

        read_in_thread(self.host, request, read, None if is_at_hand else self.host.loader)

    # Steps

    def advance(self) -> bool:
        """Launch and collect steps; whether there was anything to do."""
        self.is_advancing = True
        try:
            has_moved = self.engine.advance()
        finally:
            self.is_advancing = False
            self._send()
        if has_moved:
            before, (num_prompt, num_output) = self._tokens_done, self.engine.scheduler.tokens_done
            if (num_prompt, num_output) != before:
                self._tokens_done = num_prompt, num_output
                self.host.figures.step(self.name, num_prompt + num_output - sum(before))
                if num_output != before[1]:  # a step has succeeded; on a GPU it was no job of the lane
                    self.lane.last_done = self.host.clock()
        return has_moved

    def _send(self) -> None:
        """Send everything that a step brought, with one look at the clock. Most are tokens of streams that had one in
        the step
        before: the time between is counted once for all of a tenant's.
        """
        batches = [(label, batch) for label, batch in self.batches.items() if batch]
        if not batches:
            return
        now = self.host.clock()
        before = self._sent_at
        answer = self.host.answer
        drafts = self.engine.scheduler.speculation is not None  # a delta may have several tokens
        self._sent_at = now
        for label, batch in batches:
            deltas, num_apart = batch[:], 0
            batch.clear()
            for generation, delta in deltas:
                admitted = generation.admitted
                request = generation.request
                message = generation.message
                is_plain = generation.last_token_at == before and admitted is not None and message.stream
                if is_plain and not request.is_over and delta.finish_reason is None and delta.logprobs is None:
                    assert admitted is not None  # as `HostedGeneration.send`, at a third of the cost
                    admitted.num_output_tokens += len(delta.token_ids)
                    generation.last_token_at = now
                    answer(request, Chunk(request_id=message.request_id, index=delta.index, token_ids=delta.token_ids))
                else:
                    num_apart += 1
                    generation.send(delta, now)
            recent = self.history.recent[label]
            recent.tokens(now, sum(len(delta.token_ids) for _, delta in deltas) if drafts else len(deltas))
            if count := len(deltas) - num_apart:
                self.host.figures.gaps(self.name, (now - before,), label, times=count)
                recent.gaps(now, now - before, count)

    def configure(self, options: dict[str, Any]) -> dict[str, Any]:
        changed = self.engine.configure(**options)
        self.controller.max_queued = self.engine.config.max_queue_size
        return changed

    def expect(self, request: AdmittedRequest, unread: list[AdmittedRequest]) -> tuple[float, float]:
        """As OverloadController.expect."""
        scheduler, tenant, most = self.engine.scheduler, request.tenant.name, self.controller.max_tokens
        now = scheduler.clock()
        arriving = Request(
            "",
            (),
            SamplingParams(n=request.num_sequences, max_tokens=request.max_tokens),
            most if request.max_tokens is None else min(request.max_tokens, most),
            namespace=Namespace(tenant),
            priority=request.priority,
            deadline=None if request.deadline_s is None else now + request.deadline_s,
            arrival=now,
        )
        is_fair = isinstance(scheduler.policy, FairShare)
        lengths = [one.num_prompt_tokens for one in unread if not is_fair or one.tenant.name == tenant]
        return self.engine.expect(arriving, request.num_prompt_tokens, lengths)

    def load(self) -> ReplicaLoad:
        """For routers."""
        status, scheduler = self.engine.queue_status(), self.engine.scheduler
        num_admitted = sum(one.num_sequences for one in (*self.controller.waiting, *self.controller.running))
        return ReplicaLoad(
            prompt_token_s=scheduler.cost.prompt_s(USUAL_TOKENS) / USUAL_TOKENS,
            slot_s=scheduler.forecast.row_s(),
            step_s=scheduler.cost.step_s(status["running"]) if status["running"] else 0.0,
            num_running=status["running"],
            num_waiting=max(status["waiting"], num_admitted - status["running"]),
            max_running=status["max_running"],
            waiting_tokens=status["prompt_tokens_left"],
            is_fair=isinstance(scheduler.policy, FairShare),
            cache_use=status["cache_use"],
        )

    def view(self, tenant: str, *, sees_all: bool) -> dict[str, Any]:
        """For the live view of a tenant; at most one in VIEW_S is made, whoever asks how often."""
        now, key = self.host.clock(), (tenant, sees_all)
        made_at, found = self._views.pop(key, (-math.inf, {}))
        if now - made_at >= VIEW_S:
            made_at, requests = now, self.history.requests(tenant)
            num_drafts = sum(one["draft_tokens"] for one in requests)
            found = {
                **self.engine.cache_view(tenant, sees_all=sees_all),
                **self.history.figures(tenant, sees_all=sees_all),
                "acceptance": sum(one["accepted_tokens"] for one in requests) / num_drafts if num_drafts else None,
                "requests": requests,
            }
        self._views[key] = made_at, found
        if len(self._views) > MAX_VIEWS:
            del self._views[next(iter(self._views))]
        return found

    def stats(self) -> dict[str, Any]:
        return {
            **engine_counts(self.engine),
            "admission": self.controller.stats(),
            "jobs": self.lane.num_done,
            "busy_s": self.lane.busy_s,
            **self.history.figures("", sees_all=True),
        }


@dataclass(eq=False, slots=True)
class HostedGeneration:
    """One generation request: turns what the engine brings into the answers that its client asked for."""

    model: HostedLLM
    request: PendingRequest
    message: GenerationRequest
    params: SamplingParams
    label: str  # of its tenant, in metrics
    batch: Batch  # of the model, for this label
    remarks: list[str] = field(default_factory=list)
    live: Request | None = None
    admitted: AdmittedRequest | None = None  # None for a health check
    last_token_at: float = 0.0
    is_sent_by_loop: bool = False  # a request without text: its deltas are sent at the end of a step

    def release(self) -> None:
        """The request is over, whether it has reached the engine or not."""
        if self.live is not None and self.live.collector.result is None:
            self.model.engine.abort(self.live.request_id)
        if self.admitted is not None:
            self.model.controller.end(self.admitted)

    def on_delta(self, delta: TextDelta) -> None:
        """In the loop, or in the thread that makes text."""
        if self.is_sent_by_loop and self.model.is_advancing:
            self.batch.append((self, delta))
        else:
            now = self.model.host.clock()
            if self.admitted is not None:
                self.model.history.recent[self.label].tokens(now, len(delta.token_ids))
            self.send(delta, now)

    def send(self, delta: TextDelta, now: float) -> None:
        """Answer with new tokens."""
        request = self.request
        message = self.message
        model = self.model
        admitted = self.admitted
        if request.is_over:
            if delta.output is not None:
                self._count(delta.output)
            return
        is_first = not self.last_token_at
        times = self._times() if is_first else None
        if delta.token_ids and admitted is not None:
            admitted.num_output_tokens += len(delta.token_ids)
            if times is not None:
                self._begin(admitted, times)
            elif now > self.last_token_at or self.params.n == 1:  # else one of several sequences
                model.host.figures.gaps(model.name, (now - self.last_token_at,), self.label)
                model.history.recent[self.label].gaps(now, now - self.last_token_at)
            self.last_token_at = now
        if message.stream:
            chunk = Chunk(
                request_id=message.request_id,
                index=delta.index,
                token_ids=delta.token_ids,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                text="" if message.wants_ids else delta.text,
            )
            if delta.logprobs is not None:
                chunk.logprobs = as_tuples(delta.logprobs)
            if is_first and self.live is not None and 0 in self.live.collector.sequences:
                chunk.num_cached_tokens = self.live.collector.sequences[0].num_cached
            if times is not None and (delta.token_ids or delta.finish_reason is not None):
                chunk.metrics = {"queue_ms": times.queue_ms, "prefill_ms": times.prefill_ms}
            if delta.finish_reason == "deadline" and not self.last_token_at:
                chunk.retry_after_s = model.controller.retry_after_s(request.tenant)
            model.host.answer(request, chunk)
        if delta.output is not None:
            self._end(delta.output)

    def _begin(self, admitted: AdmittedRequest, times: RequestMetrics) -> None:
        """The first token has come."""
        model = self.model
        model.host.figures.first_token(model.name, times.ttft_ms / 1000, self.label)
        model.history.recent[self.label].first_token(model.host.clock(), times.ttft_ms / 1000)
        if self.is_sent_by_loop:
            model.controller.start(admitted)
        else:
            model.host.post(partial(model.controller.start, admitted))

    def _times(self) -> RequestMetrics:
        """So far; the collector lets go of the sequences when all of them have ended."""
        assert self.live is not None
        collector: OutputCollector = self.live.collector
        return (
            request_metrics(list(collector.sequences.values()))
            if collector.result is None
            else collector.result.metrics
        )

    def _count(self, result: RequestOutput) -> None:
        """Record the times of a request that has ended, whatever ended it."""
        if self.admitted is not None:
            times = result.metrics
            self.model.history.ended(self.request.tenant.name, result)
            self.model.host.figures.ended(
                self.model.name,
                times.queue_ms,
                times.prefill_ms,
                times.decode_ms,
                [output.finish_reason for output in result.outputs],
                self.label,
                num_prompt_tokens=times.num_prompt_tokens,
                num_output_tokens=times.num_output_tokens,
            )

    def _end(self, result: RequestOutput) -> None:
        reasons = [output.finish_reason for output in result.outputs]
        message = self.message
        host = self.model.host
        self._count(result)
        if "error" in reasons:
            error = next((output.error for output in result.outputs if output.error is not None), None)
            host.fail(self.request, error or RuntimeError("a sequence ended with an error"))
            return
        if "abort" in reasons:  # by the engine: after a cancellation the request would be over
            stopped = StoppedError(
                "The engine was stopped before the answer was complete.", hint="Send the request again."
            )
            host.fail(self.request, stopped)
            return
        answer = Generated(
            request_id=message.request_id,
            model=message.adapter or self.model.name,
            remarks=self.remarks,
            num_prompt_tokens=len(result.prompt_token_ids),
            num_output_tokens=result.metrics.num_output_tokens,
            num_cached_tokens=result.num_cached_tokens,
            metrics={name: getattr(result.metrics, name) for name in METRICS},
            adapter_digest="" if self.live is None else self.live.namespace.adapter,
        )
        for output in result.outputs:
            shown = WireOutput(
                index=output.index,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                cumulative_logprob=output.cumulative_logprob,
            )
            if not message.stream:
                shown.token_ids, shown.text = output.token_ids, "" if message.wants_ids else output.text
                shown.logprobs = None if output.logprobs is None else as_tuples(output.logprobs)
            answer.outputs.append(shown)
        if "deadline" in reasons and not self.last_token_at:
            answer.retry_after_s = self.model.controller.retry_after_s(self.request.tenant)
        if message.token_ids is None:
            answer.prompt_token_ids = result.prompt_token_ids
        if result.prompt_logprobs is not None:
            answer.prompt_logprobs = as_tuples(result.prompt_logprobs)
        host.answer(self.request, answer)


def card_of(facts: ModelFacts, config: EngineConfig) -> dict[str, Any]:
    """What clients are told of a model, loaded or not."""
    return {
        "max_length": facts.max_len,
        "vocab_size": facts.vocab_size,
        "directory": str(facts.tokenizer_directory or ""),
        "is_tts": is_tts(facts),
        "device": facts.device,
        "dtype": facts.dtype,
        "max_prompt_bytes": config.max_prompt_bytes,
        "max_sequence": facts.longest,
        "default_sampling": dict(facts.default_sampling),
    }


def is_tts(facts: ModelFacts) -> bool:
    """Whether a model generates speech: an RWKV-7 whose vocabulary has TTS tokens, without a tokenizer of its own."""
    return facts.has_states and facts.vocab_size >= VOCAB_SIZE and facts.find_tokenizer() is None


def as_tuples(logprobs: Sequence[TokenLogprobs]) -> list[tuple[int, float, int, list[tuple[int, float]]]]:
    return [(one.token_id, one.logprob, one.rank, one.top) for one in logprobs]
