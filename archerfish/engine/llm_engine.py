"""LLMEngine: prompts in, text out.

The threads that wait for answers run the engine: one of them computes a step for all, the others wait for the result.
Nothing runs while no thread waits, and several threads may submit at once. AsyncLLMEngine has a thread of its own for
that.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

from archerfish.cache.radix import CacheStats, HitRecord
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.adapters import AdapterLibrary, with_adapter
from archerfish.engine.llm_loading import check_changes, choose_step_tokens, make_scheduler, read_facts
from archerfish.engine.outputs import (
    EngineStats,
    Listener,
    OutputCollector,
    RequestOutput,
    TextDelta,
    Watcher,
    split_reasoning,
)
from archerfish.engine.progress import progress_bar
from archerfish.engine.rank_processes import start_runner
from archerfish.engine.request_maker import RUNNING_OPTIONS, RequestMaker, change_running_options
from archerfish.engine.request_maker import Prompt as Prompt
from archerfish.errors import InvalidInputError, NotFoundError, StoppedError
from archerfish.kernels.sampling import PoolStats
from archerfish.params import SamplingParams
from archerfish.runtime.runner import RunningStep
from archerfish.sched.plan import Plan
from archerfish.sequence import Delta, Namespace, Request, as_namespace
from archerfish.step import StepResult
from archerfish.text.grammar import GrammarCompiler
from archerfish.types import Closing, Progress, no_progress

if TYPE_CHECKING:
    from archerfish.text.chat_template import ChatTemplate

Message = Mapping[str, Any]
OnResult = Callable[[int, RequestOutput], None]
logger = logging.getLogger("archerfish.engine")
MAX_KEPT_OUTPUTS = 4096  # results of add_request that were not fetched


class LLMEngine(Closing):
    """Generation over paged KV or states with a prefix cache and continuous batching. Safe to use from several threads
    at once.

    executor: one thread that other engines compute in too. text_thread: one thread that text is made in; None: where
    one steps.
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        hub: HubConfig | None = None,
        progress: Progress = no_progress,
        executor: Executor | None = None,
        text_thread: Executor | None = None,
        **options: Any,
    ) -> None:
        imports_torch = "torch" not in sys.modules
        if isinstance(model, EngineConfig):
            self.config = model.replace(**options) if options else model
        else:
            self.config = EngineConfig(**(options if model is None else {"model": str(model), **options}))
        facts = read_facts(self.config, hub or HubConfig(), progress)
        self.model_name, self.tokenizer = facts.name, facts.find_tokenizer()
        self.grammars = GrammarCompiler(self.tokenizer, facts.vocab_size, facts.name, self.config.grammar_seconds)
        self.runner, facts, self.config = start_runner(facts, self.config, hub or HubConfig(), executor, progress)
        self.runner.ops.pin_threads(self.config.pin_threads)
        self.facts = facts
        self._executor = executor
        self._text_thread = text_thread
        self._lock = threading.RLock()  # over the scheduler and the tables below; never held while a step computes
        self._changed = threading.Condition(self._lock)  # notified after every step and every submission
        wake = getattr(executor, "wake", None)
        self.adapters = AdapterLibrary.of(self.config, facts, self.runner, self._changed, wake)
        slots = None if self.adapters is None else self.adapters.slots
        self.scheduler, self.logits_cache = make_scheduler(self.config, facts, self.runner, wake, slots)
        self.requests = RequestMaker(
            facts, self.config, self.tokenizer, self.grammars, self.scheduler.clock, self.adapters
        )
        self._live: dict[str, Request] = {}  # by id
        self._num_ended = 0
        self.watcher: Watcher | None = None  # called with every delta, after its text was made
        self._kept: OrderedDict[str, RequestOutput] = OrderedDict()
        self._in_flight: deque[tuple[Plan, RunningStep]] = deque()  # steps that are launched and not yet committed
        self._is_stepping = False
        self._has_idle_work = True
        self._is_closed = False
        self._process = os.getpid()
        if imports_torch and "torch" in sys.modules:
            gc.collect()  # its import leaves frames behind that refer to this engine
        gc.freeze()  # what was loaded stays: collections that come in the middle of steps need not look at it

    # Submitting

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        namespace: Namespace | str = "",
        wants_logits: bool = False,
        adapter: str | None = None,
        listener: Listener | None = None,
    ) -> str:
        """Queue a request and return its id. It runs while a thread steps or waits; `get_output` has its result.

        deadline_s: seconds from now after which it ends. namespace: it shares cached contexts only within this.
        wants_logits:
        the result has those of the token after the prompt. adapter: the name of a LoRA adapter.
        """
        request = self.requests.make(
            prompt,
            sampling_params,
            listener=listener,
            is_kept=True,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            namespace=namespace,
            wants_logits=wants_logits,
            adapter=adapter,
        )
        self.submit(request)
        return request.request_id

    def _check_usable(self) -> None:
        if self._is_closed:
            raise StoppedError("This LLMEngine has been closed.", hint="Make a new one.")
        if os.getpid() != self._process:
            raise StoppedError(
                "This LLMEngine was left behind by a fork.", hint="Make one in every process, after the fork."
            )

    def submit(self, request: Request) -> None:
        """Queue a request that `requests.make` has made."""
        with self._changed:
            self._check_usable()
            self.scheduler.add(request)
            self._live[request.request_id] = request
            self._changed.notify_all()

    # Running

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step, take in the one before it, and return the requests that ended."""
        with self._changed:
            while self._is_stepping:
                self._changed.wait()
            self._is_stepping = True
        try:
            return self._step()
        finally:
            self._end_step()

    def _end_step(self) -> None:
        with self._changed:
            self._is_stepping = False
            self._changed.notify_all()

    def _step(self) -> list[RequestOutput]:
        depth = self.config.pipeline_depth
        ended = self._collect_down_to(depth)  # more are open only where ctrl-c came between
        is_launched = self._launch_next()
        if not is_launched and not self._in_flight and not (self.adapters is not None and self.adapters.wait()):
            self.scheduler.wait()
        return ended + self._collect_down_to(depth if is_launched else 0)

    def advance(self) -> bool:
        """Do as much of `step` as needs no waiting for a thread that computes; whether that was anything."""
        with self._changed:
            if self._is_stepping or self._is_closed:
                return False
            self._is_stepping = True
        try:
            depth = self.config.pipeline_depth
            is_launched = len(self._in_flight) <= depth and self._launch_next()
            num_before = len(self._in_flight)
            self._collect_down_to(depth if is_launched else 0, waits=False)
            return is_launched or len(self._in_flight) < num_before
        finally:
            self._end_step()

    def _collect_down_to(self, num_in_flight: int, *, waits: bool = True) -> list[RequestOutput]:
        """Commit steps until so many are in flight, and deliver all that is new. waits: false stops at one that still
        computes.

        A step stays in flight while it is waited for, so that ctrl-c loses nothing.
        """
        ended: list[RequestOutput] = []
        while len(self._in_flight) > num_in_flight and (waits or self._in_flight[0][1].done()):
            plan, running = self._in_flight[0]
            error: Exception | None = None
            try:
                result = running.result()
            except Exception as raised:  # a step that fails ends its own requests, not the engine
                error = raised
            self._in_flight.popleft()
            with self._lock:
                if error is None:
                    self.scheduler.commit(plan, result)
                else:
                    self.scheduler.fail(plan, error)
            if len(self._in_flight) > num_in_flight:
                ended += self._deliver()
        return ended + self._deliver()

    def _launch_next(self) -> bool:
        """Plan a step and launch it; false if there is nothing to compute."""
        with self._lock:
            plan = self.scheduler.plan()
        if plan is None:
            return False
        try:
            self._in_flight.append((plan, self.runner.launch(plan.input)))
        except BaseException as error:  # the plan is open: whatever ended its launch must end it too
            failed: Future[StepResult] = Future()
            failed.set_exception(error if isinstance(error, Exception) else StoppedError("The step was interrupted."))
            self._in_flight.append((plan, failed))
            if not isinstance(error, Exception):
                raise
        return True

    def _deliver(self) -> list[RequestOutput]:
        """Text of all that the scheduler reports; finding a stop string may make it report more."""
        ended: list[RequestOutput] = []
        while True:
            with self._lock:
                deltas = [
                    delta for delta in self.scheduler.take_deltas() if delta.sequence.request.request_id in self._live
                ]
            if not deltas:
                return ended
            if self._text_thread is not None:
                with_text = [delta for delta in deltas if delta.sequence.request.collector.has_text]
                deltas = [delta for delta in deltas if not delta.sequence.request.collector.has_text]
                if with_text:
                    self._text_thread.submit(self._collect, with_text)
            ended += self._collect(deltas)

    def _collect(self, deltas: list[Delta]) -> list[RequestOutput]:
        """Add deltas to the outputs of their requests; gives the results that are complete now."""
        ended: list[RequestOutput] = []
        for delta in deltas:
            collector: OutputCollector = delta.sequence.request.collector
            try:
                if collector.add(delta):
                    with self._lock:
                        self.scheduler.finish(delta.sequence, "stop")
            except Exception:  # the thread here may wait for other requests: this one must end all the same
                logger.exception("The text of request %s could not be made.", collector.request_id)
                collector.texts = [None] * len(collector.texts)  # go on with ids alone
                with self._lock:
                    self.scheduler.finish(delta.sequence, "error")
                if delta.finish_reason is not None and collector.result is None:
                    collector.add(delta)
            if self.watcher is not None:
                self.watcher(delta, collector.result)
            if collector.result is None:
                continue
            ended.append(collector.result)
            with self._lock:
                self._num_ended += 1
                self._live.pop(collector.result.request_id, None)
                if collector.is_kept:
                    self._kept[collector.result.request_id] = collector.result
                while len(self._kept) > MAX_KEPT_OUTPUTS:
                    self._kept.popitem(last=False)
        return ended

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Step, or let another thread step, until a condition on finished work holds."""
        while True:
            with self._changed:
                while self._is_stepping and not is_done():
                    self._changed.wait()
                if is_done():
                    return
                self._check_usable()
                self._is_stepping = True
            try:
                self._step()
            finally:
                self._end_step()

    def settle(self) -> None:
        """Take in the step that was in flight when the last request ended, so that no work is left open."""
        self.wait_until(lambda: bool(self._live) or not self.has_work or self._is_closed)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Whether there is something to step; waits for it. A submission ends the wait at once."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_work or self._is_closed, timeout_s) and not self._is_closed

    def use_idle_time(self) -> bool:
        """Do a piece of what later steps would have to do, if no thread steps now; whether there is more of it."""
        with self._changed:
            if self._is_stepping or self._is_closed or not self._has_idle_work:
                return False
            self._is_stepping = True
        try:
            self._has_idle_work = self.runner.use_idle_time()
        except Exception:  # a step that needs it will do without it, or say so
            self._has_idle_work = False
        finally:
            self._deliver()  # of requests that were aborted meanwhile
            self._end_step()
        return self._has_idle_work

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # Answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
        on_result: OnResult | None = None,
        **request_options: Any,
    ) -> list[RequestOutput]:
        """Results of one or more prompts (strings or lists of token ids), in their order.

        All prompts are checked before the first one runs. sampling_params is one for all or one for each. on_result is
        called with the place of a prompt and its result when it ends.
        """
        requests = self.requests.make_many(prompts, sampling_params, **request_options)
        for request in requests:
            self.scheduler.check(request)
        with progress_bar("Generating", show=show_progress) as progress:
            self._run_all(requests, progress, on_result)
        return [request.collector.result for request in requests]

    def generate_batch(self, inputs: Sequence[Prompt], sampling_params: SamplingParams | None = None) -> list[str]:
        """The texts of some prompts, in their order."""
        return [output.text for output in self.generate(list(inputs), sampling_params)]

    def _run_all(self, requests: list[Request], progress: Progress, on_result: OnResult | None) -> None:
        """Run requests, keeping the queue filled but never over its limit; if interrupted, abort what is left."""
        left = deque(requests)
        running = dict(enumerate(requests))

        def has_room() -> bool:
            return bool(left) and self.scheduler.has_room

        def report() -> None:
            for place, request in list(running.items()):
                if request.collector.result is not None:
                    del running[place]
                    if on_result is not None:
                        on_result(place, request.collector.result)
            progress(len(requests) - len(running), len(requests), "")

        try:
            while running:
                with self._lock:
                    while has_room():
                        self.submit(left.popleft())
                    seen = self._num_ended
                self.wait_until(lambda seen=seen: has_room() or self._num_ended > seen)  # type: ignore[misc]
                report()
            self.settle()
        except KeyboardInterrupt:
            report()
            raise
        finally:
            for request in requests:
                if request.collector.result is None:
                    self.abort(request.request_id)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **request_options: Any
    ) -> Generator[TextDelta, None, None]:
        """What a prompt's answer gains, as it comes. Closing the iterator aborts the request."""
        arrived: deque[TextDelta] = deque()
        request = self.requests.make(prompt, sampling_params, listener=arrived.append, **request_options)
        self.submit(request)
        num_open = request.params.n
        try:
            while num_open:
                self.wait_until(lambda: bool(arrived))
                delta = arrived.popleft()
                num_open -= delta.finish_reason is not None
                yield delta
            self.settle()
        finally:
            if num_open:
                self.abort(request.request_id)

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation, through the model's own chat template, ready for the answer."""
        if self.tokenizer is None:
            raise InvalidInputError(
                f"{self.model_name} has no tokenizer.", hint="Give the prompt as a list of token ids."
            )
        return self.chat_template.encode(self.tokenizer, messages, **template_options)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's own; an error says so where it has none."""
        from archerfish.text.chat_template import ChatTemplate

        facts = self.facts
        return ChatTemplate.find(facts.tokenizer_directory or facts.directory, facts.name, self.tokenizer)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        **request_options: Any,
    ) -> RequestOutput:
        """The answer to a conversation: a list of {"role": ..., "content": ...}."""
        prompt = self.render_chat(messages, **(template_options or {}))
        params = self.chat_template.stopping(sampling_params or self.get_default_sampling_params())
        return split_reasoning(self, self.generate([prompt], params, **request_options), [params])[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        **request_options: Any,
    ) -> Generator[TextDelta, None, None]:
        """The answer to a conversation as it comes."""
        prompt = self.render_chat(messages, **(template_options or {}))
        params = self.chat_template.stopping(sampling_params or self.get_default_sampling_params())
        return self.stream(prompt, params, **request_options)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: those of the model's generation_config.json, where it states
        some."""
        return self.requests.default_params

    def get_output(self, request_id: str) -> RequestOutput | None:
        """The result of add_request; None until it is done. The last 4,096 results are kept."""
        with self._lock:
            if request_id in self._kept:
                return self._kept[request_id]
            if request_id not in self._live:
                raise NotFoundError(f"There is no request {request_id!r}.", hint="It never was, or its result is gone.")
            return None

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request now, or one of its sequences; memory goes back. False if it is not there any more."""
        with self._changed:
            found = self.scheduler.abort(request_id) if index is None else self.scheduler.finish_one(request_id, index)
            is_idle = not self._is_stepping
            self._changed.notify_all()
        if found and is_idle:
            self._deliver()
        return found

    # Looking in

    def explain(self, prompt: Prompt, namespace: Namespace | str = "", adapter: str = "") -> HitRecord:
        """What the cache would do for a prompt now, and why; changes nothing."""
        token_ids, where = self.requests.tokenize(prompt), as_namespace(namespace)
        where = with_adapter(where, self.requests.adapter(adapter)) if adapter else where
        with self._lock:
            return self.scheduler.explain(token_ids, where)

    def engine_stats(self) -> EngineStats:
        with self._lock:
            return EngineStats.of(self.scheduler.stats(), self.scheduler.cache.stats())

    def pool_stats(self) -> PoolStats:
        """Of the large arrays that steps use again: while the batch does not grow, cache_misses stands still."""
        return self.runner.ops.pool_stats()

    def cache_stats(self) -> CacheStats:
        with self._lock:
            return self.scheduler.cache.stats()

    def clear_cache(self) -> None:
        """Forget all cached contexts; running requests keep what they use."""
        with self._lock:
            self.scheduler.cache.clear()

    def configure(self, **changes: Any) -> dict[str, Any]:
        """Change options while requests run; nothing of them is lost. Returns those that can be changed, as they are
        now."""
        config, scheduler = change_running_options(self.config, changes), self.scheduler
        check_changes(self.facts, self.config, config)
        with self._lock:
            scheduler.resize(choose_step_tokens(config, self.facts.device), config.max_queue_size)
            if "logits_cache_mib" in changes or "logits_cache_ttl_s" in changes:
                self.logits_cache.resize(config.logits_cache_mib << 20, config.logits_cache_ttl_s)
            if config.eviction_policy != self.config.eviction_policy:
                scheduler.cache.set_policy(config.eviction_policy)
            if not config.enable_prefix_caching:
                scheduler.cache.clear()
            scheduler.cache.is_enabled = config.enable_prefix_caching
            self.requests.max_prompt_bytes = config.max_prompt_bytes
            self.config = config
        return {name: getattr(config, name) for name in RUNNING_OPTIONS}

    def cache_view(self, tenant: str, *, sees_all: bool) -> dict[str, Any]:
        with self._lock:
            return self.scheduler.view(tenant, sees_all=sees_all)

    def queue_status(self) -> dict[str, Any]:
        with self._lock:
            return self.scheduler.queue_status()

    def expect(self, request: Request, num_tokens: int, unread: list[int]) -> tuple[float, float]:
        """Seconds that a request would wait and its service would take if it came now: see Forecast.expect."""
        with self._lock:
            return self.scheduler.forecast.expect(request, num_tokens, unread)

    def close(self) -> None:
        """Abort what runs, refuse further work and give the memory back."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._abort_all()
        self._collect_down_to(0)
        if self._text_thread is not None:
            self._text_thread.submit(self._deliver).result()
        self.scheduler.close()
        if self.adapters is not None:
            self.adapters.close()
        self.runner.close()
        gc.unfreeze()
        with self._changed:
            self._changed.notify_all()

    def _abort_all(self) -> None:
        """Abort all requests, and wait for the end of a step in another thread. The caller holds `_changed`."""
        for request_id in list(self._live):
            self.scheduler.abort(request_id)
        while self._is_stepping:
            self._changed.wait()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and not sys.is_finalizing() and os.getpid() == self._process:
            self.runner.close(waits=False)
            gc.unfreeze()

    def __repr__(self) -> str:
        name = type(self).__name__
        facts = self.facts
        memory = self.facts.memory
        room = f"states={memory.num_blocks}" if facts.has_states else f"kv_tokens={memory.num_tokens}"
        return f"{name}({facts.name!r}, device={facts.device!r}, dtype={facts.dtype!r}, {room})"
