"""LLMEngine: prompts in, text out.

Whoever waits for an answer drives the engine: one of the waiting threads runs a step for all, the others wait for what it
brings. So nothing runs while nobody waits, and several threads may submit at once. AsyncLLMEngine has a thread for it.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, Self

from archerfish.background import Lazy
from archerfish.cache.hits import HitRecord
from archerfish.cache.radix import CacheStats
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.live_request import Listener, LiveRequest, Watcher
from archerfish.engine.llm_loading import check_changes, choose_step_tokens, load_adapter, make_scheduler, read_facts
from archerfish.engine.outputs import EngineStats, RequestOutput, TextDelta
from archerfish.engine.progress import progress_bar
from archerfish.engine.request_options import (
    RUNNING_OPTIONS,
    check_option_values,
    check_prompt_bytes,
    check_request_options,
    check_running_options,
    check_running_values,
    check_vocabulary,
    is_token_ids,
    read_token_ids,
)
from archerfish.errors import InputTooLargeError, InvalidInputError, NotFoundError, StoppedError
from archerfish.kernels.buffers import PoolStats
from archerfish.params import SamplingParams
from archerfish.runtime.kv_pool import allocate_pool
from archerfish.runtime.runner import ModelRunner, RunningStep
from archerfish.sequence import Delta, Namespace, Plan, Request, StepResult
from archerfish.text.chat_template import ChatTemplate
from archerfish.text.grammar import GrammarCompiler
from archerfish.text.text_tokenizer import find_text_tokenizer
from archerfish.types import Progress, no_progress

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
OnResult = Callable[[int, RequestOutput], None]
logger = logging.getLogger("archerfish.engine")
MAX_KEPT_OUTPUTS = 4096  # results of add_request that nobody has fetched


class LLMEngine:
    """Generation over paged KV or states with a prefix cache and continuous batching. Safe to use from several threads at once.

    executor: one thread that other engines compute in too. text_thread: one thread that text is made in; None: where one steps.
    """

    def __init__(
        self, model: str | EngineConfig | None = None, *, hub: HubConfig | None = None, progress: Progress = no_progress,
        executor: Executor | None = None, text_thread: Executor | None = None, **options: Any,
    ) -> None:
        if isinstance(model, EngineConfig):
            self.config = model.replace(**options) if options else model
        else:
            self.config = EngineConfig(**(options if model is None else {"model": str(model), **options}))
        facts = read_facts(self.config, hub or HubConfig(), progress)
        self.model_name = facts.name
        tokenizer = self.tokenizer = find_text_tokenizer(facts.directory, facts.config.values, facts.generation_config)
        self.grammars = GrammarCompiler(self.tokenizer, facts.vocab_size, facts.name)
        adapter = load_adapter(facts, self.config)
        pool, memory = allocate_pool(facts.device, adapter.ops, facts.memory_shape, facts.memory)
        facts = self.facts = replace(facts, memory=memory)
        with adapter.ops.allocating(f"{self.config.max_num_seqs} sequences"):
            self.runner = ModelRunner(
                adapter, pool, vocab_size=facts.vocab_size, max_num_seqs=self.config.max_num_seqs,
                is_deterministic=self.config.deterministic, num_threads=self.config.num_threads, executor=executor,
            )
        adapter.ops.leave_thread()
        self.runner.warm_up()
        self.scheduler, self.logits_cache = make_scheduler(self.config, facts)
        self._text_thread = text_thread
        self._chat_template = Lazy(lambda: ChatTemplate.find(facts.directory, facts.name, tokenizer))
        self._seeds = random.Random(self.config.seed or None)
        self._ids = itertools.count()
        self._live: dict[str, LiveRequest] = {}
        self._num_ended = 0
        self.watcher: Watcher | None = None  # hears of every delta, after its text was made
        self._kept: OrderedDict[str, RequestOutput] = OrderedDict()
        self._in_flight: deque[tuple[Plan, RunningStep]] = deque()
        self._lock = threading.RLock()  # over the scheduler and the tables above; never held while a step computes
        self._turn = threading.Condition(self._lock)  # notified after every step and every submission
        self._is_stepping = False
        self._has_idle_work = True
        self._is_closed, self._process = False, os.getpid()
        gc.freeze()  # what was loaded stays: collections that come in the middle of steps need not look at it

    # Submitting

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None,
        priority: int = 0, deadline_s: float | None = None, namespace: Namespace | str = "", wants_logits: bool = False,
        listener: Listener | None = None,
    ) -> str:
        """Queue a request and return its id. It runs when someone steps or waits; `get_output` has its result.

        deadline_s: seconds from now after which it is given up. namespace: whose cached contexts it may share. wants_logits:
        the result has those of the token after the prompt.
        """
        params = sampling_params or SamplingParams()
        request, text = self._make_request(prompt, params, request_id, priority, deadline_s, namespace, wants_logits)
        self.submit(LiveRequest(request, text, self.tokenizer, listener))
        return request.request_id

    def prepare_request(
        self, prompt: Prompt, sampling_params: SamplingParams, *, listener: Listener, wants_text: bool = True, **options: Any
    ) -> LiveRequest:
        """A request for `submit`, which nothing of it keeps waiting: text is tokenised and checked here, in any thread.

        Its result goes to the listener alone. wants_text: false spares making text, unless stop strings are looked for in it.
        """
        check_request_options(options)
        request, text = self._make_request(prompt, sampling_params, **options)
        tokenizer = self.tokenizer if wants_text or sampling_params.stop else None
        return LiveRequest(request, text, tokenizer, listener, is_kept=False)

    def _make_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0,
        deadline_s: float | None = None, namespace: Namespace | str = "", wants_logits: bool = False,
    ) -> tuple[Request, str | None]:
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"sampling_params must be a SamplingParams, not {type(params).__name__}.")
        check_option_values(request_id, priority, deadline_s, namespace, wants_logits)
        check_vocabulary(params, self.facts.vocab_size)
        token_ids, text = self._tokenize(prompt)
        room = self.facts.max_len - len(token_ids)
        if room < 1:
            raise InputTooLargeError(
                f"The prompt has {len(token_ids):,} tokens; {self.model_name} takes {self.facts.max_len:,}, output included.",
                hint="Shorten it.",
            )
        if params.max_tokens is None:
            room = min(room, max(1, self.facts.memory.num_tokens - len(token_ids) - self.facts.memory.block_size))
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= frozenset(self.tokenizer.eos_token_ids if self.tokenizer else self.facts.end_token_ids)
        grammar = None if params.grammar is None else self.grammars.compile(params.grammar)
        now = self.scheduler.clock()
        request = Request(
            request_id=request_id or f"request-{next(self._ids)}", prompt_token_ids=token_ids, params=params,
            max_tokens=min(params.max_tokens or room, room), stop_token_ids=stops,
            namespace=Namespace(namespace) if isinstance(namespace, str) else namespace, priority=priority,
            deadline=None if deadline_s is None else now + deadline_s,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            needs_host_token=grammar is not None, grammar=grammar, wants_logits=wants_logits,
        )
        return request, text

    def _tokenize(self, prompt: Prompt) -> tuple[Sequence[int], str | None]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInputError(f"{self.model_name} has no tokenizer.", hint="Give the prompt as a list of token ids.")
            check_prompt_bytes([prompt], self.config.max_prompt_bytes)
            token_ids: Sequence[int] = self.tokenizer.encode(prompt)
        elif is_token_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
            token_ids = read_token_ids(prompt, self.facts.vocab_size)
        else:
            what = f"a list that begins with {prompt[0]!r}" if isinstance(prompt, list) else type(prompt).__name__
            raise InvalidInputError(f"A prompt must be a string or a list of token ids, not {what}.")
        if not token_ids:
            raise InvalidInputError("The prompt is empty.", hint="Give at least one token.")
        return token_ids, prompt if isinstance(prompt, str) else None

    def _check_usable(self) -> None:
        if self._is_closed:
            raise StoppedError("This LLMEngine has been closed.", hint="Make a new one.")
        if os.getpid() != self._process:
            raise StoppedError("This LLMEngine was left behind by a fork.", hint="Make one in every process, after the fork.")

    def submit(self, live: LiveRequest) -> None:
        """Queue a request that `prepare_request` has made."""
        with self._turn:
            self._check_usable()
            self.scheduler.add(live.request)
            self._live[live.request.request_id] = live
            self._turn.notify_all()

    # Running

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step, take in the one before it, and return the requests that ended."""
        with self._turn:
            while self._is_stepping:
                self._turn.wait()
            self._is_stepping = True
        try:
            return self._step()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._turn:
            self._is_stepping = False
            self._turn.notify_all()

    def _step(self) -> list[RequestOutput]:
        ended = self._collect_down_to(self.config.pipeline_depth)  # more are open only where ctrl-c came between
        with self._lock:
            plan = self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        elif not self._in_flight:
            self.runner.masks.wait()
        ended += self._collect_down_to(self.config.pipeline_depth if plan is not None else 0)
        return ended + self._deliver()

    def advance(self) -> bool:
        """Do as much of `step` as needs no waiting for a thread that computes; whether that was anything."""
        with self._turn:
            if self._is_stepping or self._is_closed:
                return False
            self._is_stepping = True
        try:
            return self._advance()
        finally:
            self._end_turn()

    def _advance(self) -> bool:
        plan = None
        if len(self._in_flight) <= self.config.pipeline_depth:
            with self._lock:
                plan = self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        num_left = self.config.pipeline_depth if plan is not None else 0
        has_moved = plan is not None
        while len(self._in_flight) > num_left and self._in_flight[0][1].done():
            self._collect()
            has_moved = True
        self._deliver()
        return has_moved

    def _collect_down_to(self, num_in_flight: int) -> list[RequestOutput]:
        ended: list[RequestOutput] = []
        while len(self._in_flight) > num_in_flight:
            ended += self._collect()
        return ended

    def _launch(self, plan: Plan) -> None:
        try:
            self._in_flight.append((plan, self.runner.launch(plan)))
        except BaseException as error:  # the plan is open: whatever ended its launch must end it too
            failed: Future[StepResult] = Future()
            is_ordinary = isinstance(error, Exception)
            failed.set_exception(error if is_ordinary else StoppedError("The step was interrupted."))
            self._in_flight.append((plan, failed))
            if not is_ordinary:
                raise

    def _collect(self) -> list[RequestOutput]:
        """Take in the oldest step in flight. It stays there while it is waited for, so that ctrl-c loses nothing."""
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
        return self._deliver()

    def _deliver(self) -> list[RequestOutput]:
        """Text of all that the scheduler reports; finding a stop string may make it report more."""
        ended: list[RequestOutput] = []
        while True:
            with self._lock:
                deltas: list[Delta] = self.scheduler.take_deltas()
            if not deltas:
                return ended
            elsewhere: list[tuple[LiveRequest, Delta]] = []
            for delta in deltas:
                live = self._live.get(delta.sequence.request.request_id)
                if live is not None and live.has_text and self._text_thread is not None:
                    elsewhere.append((live, delta))
                elif live is not None:
                    ended += self._take(live, delta)
            if elsewhere and self._text_thread is not None:
                self._text_thread.submit(self._take_all, elsewhere)

    def _take(self, live: LiveRequest, delta: Delta) -> list[RequestOutput]:
        if live.take(delta):
            with self._lock:
                self.scheduler.finish(delta.sequence, "stop")
        if self.watcher is not None:
            self.watcher(delta, live.result)
        return [] if live.result is None else [self._end(live, live.result)]

    def _take_all(self, deltas: list[tuple[LiveRequest, Delta]]) -> None:
        for live, delta in deltas:
            try:
                self._take(live, delta)
            except Exception:  # nobody waits for this thread: the request must end all the same
                logger.exception("The text of request %s could not be made.", live.request.request_id)
                live.give_up_text()
                with self._lock:
                    self.scheduler.finish(delta.sequence, "error")
                if delta.finish_reason is not None:
                    self._take(live, delta)

    def _end(self, live: LiveRequest, result: RequestOutput) -> RequestOutput:
        with self._lock:
            self._num_ended += 1
            self._live.pop(live.request.request_id, None)
            if live.is_kept:
                self._kept[live.request.request_id] = result
            while len(self._kept) > MAX_KEPT_OUTPUTS:
                self._kept.popitem(last=False)
        return result

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Step, or let another thread step, until a condition on finished work holds."""
        while True:
            with self._turn:
                while self._is_stepping and not is_done():
                    self._turn.wait()
                if is_done():
                    return
                self._check_usable()
                self._is_stepping = True
            try:
                self._step()
            finally:
                self._end_turn()

    def settle(self) -> None:
        """Take in the step that was in flight when the last request ended, so that no work is left open."""
        self.wait_until(lambda: bool(self._live) or not self.has_work or self._is_closed)

    def wait_for_work(self, timeout_s: float) -> bool:
        """Whether there is something to step; waits for it. A submission ends the wait at once."""
        with self._turn:
            return self._turn.wait_for(lambda: self.has_work or self._is_closed, timeout_s) and not self._is_closed

    def use_idle_time(self) -> bool:
        """Do a piece of what later steps would have to do, if nobody steps now; whether there is more of it."""
        with self._turn:
            if self._is_stepping or self._is_closed or not self._has_idle_work:
                return False
            self._is_stepping = True
        try:
            self._has_idle_work = self.runner.use_idle_time()
        except Exception:  # a step that needs it will do without it, or say so
            self._has_idle_work = False
        finally:
            self._deliver()  # of requests that were aborted meanwhile
            self._end_turn()
        return self._has_idle_work

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    # Answers

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        show_progress: bool = False, on_result: OnResult | None = None, **request_options: Any,
    ) -> list[RequestOutput]:
        """Results of one or more prompts (strings or lists of token ids), in their order.

        All prompts are checked before the first one runs. sampling_params is one for all or one for each. on_result is called
        with the place of a prompt and its result when it ends.
        """
        check_request_options(request_options)
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise InvalidInputError(f"Expected a prompt or a list of prompts, not {type(prompts).__name__}.")
        many: list[Any] = [prompts] if isinstance(prompts, str) or is_token_ids(prompts) else list(prompts)
        is_each = isinstance(sampling_params, Sequence)
        each: list[Any] = list(sampling_params) if is_each else [sampling_params or SamplingParams()] * len(many)  # type: ignore[arg-type]
        if len(each) != len(many):
            raise InvalidInputError(f"There are {len(many)} prompts, but {len(each)} sampling parameters.")
        if len(many) > 1 and request_options.get("request_id") is not None:
            raise InvalidInputError(f"request_id names one request, but there are {len(many)} prompts.", hint="Leave it out.")
        made = [self._make_request(prompt, p, **request_options) for prompt, p in zip(many, each, strict=True)]
        lives = [LiveRequest(request, text, self.tokenizer, None) for request, text in made]
        for live in lives:
            self.scheduler.check(live.request)
        with progress_bar("Generating", show=show_progress, unit="requests") as progress:
            self._run_all(lives, progress, on_result)
        return [live.result for live in lives if live.result is not None]

    def _run_all(self, lives: list[LiveRequest], progress: Progress, on_result: OnResult | None) -> None:
        """Run requests, keeping the queue filled but never over its limit; if interrupted, abort what is left."""
        left = deque(lives)
        running = dict(enumerate(lives))

        def has_room() -> bool:
            return bool(left) and self.scheduler.num_queued < self.config.max_queue_size

        def report() -> None:
            for place, live in list(running.items()):
                if live.result is not None:
                    del running[place]
                    if on_result is not None:
                        on_result(place, live.result)
            progress(len(lives) - len(running), len(lives), "")

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
            for live in lives:
                if live.result is None:
                    self.abort(live.request.request_id)
                self.forget(live.request.request_id)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **request_options: Any
    ) -> Generator[TextDelta, None, None]:
        """What a prompt's answer gains, as it comes. Closing the iterator aborts the request."""
        check_request_options(request_options)
        arrived: deque[TextDelta] = deque()
        request_id = self.add_request(prompt, sampling_params, listener=arrived.append, **request_options)
        num_open = (sampling_params or SamplingParams()).n
        try:
            while num_open:
                self.wait_until(lambda: bool(arrived))
                delta = arrived.popleft()
                num_open -= delta.finish_reason is not None
                yield delta
            self.settle()
        finally:
            if num_open:
                self.abort(request_id)
            self.forget(request_id)

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation, through the model's own chat template, ready for the answer."""
        if self.tokenizer is None:
            raise InvalidInputError(f"{self.model_name} has no tokenizer.", hint="Give the prompt as a list of token ids.")
        return self.chat_template.encode(self.tokenizer, messages, **template_options)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's own; an error says so where it has none."""
        return self._chat_template.get()

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, *,
        template_options: Mapping[str, Any] | None = None, **request_options: Any,
    ) -> RequestOutput:
        """The answer to a conversation: a list of {"role": ..., "content": ...}."""
        prompt = self.render_chat(messages, **(template_options or {}))
        return self.generate([prompt], self.chat_template.stopping(sampling_params), **request_options)[0]

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, *,
        template_options: Mapping[str, Any] | None = None, **request_options: Any,
    ) -> Generator[TextDelta, None, None]:
        """The answer to a conversation as it comes."""
        prompt = self.render_chat(messages, **(template_options or {}))
        return self.stream(prompt, self.chat_template.stopping(sampling_params), **request_options)

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
        with self._turn:
            found = self.scheduler.abort(request_id) if index is None else self.scheduler.finish_one(request_id, index)
            is_idle = not self._is_stepping
            self._turn.notify_all()
        if found and is_idle:
            self._deliver()
        return found

    def forget(self, request_id: str) -> None:
        """Drop a kept result that nobody will ask for."""
        with self._lock:
            self._kept.pop(request_id, None)

    # Looking in

    def explain(self, prompt: Prompt, namespace: Namespace | str = "") -> HitRecord:
        """What the cache would do for a prompt now, and why; changes nothing."""
        token_ids, _ = self._tokenize(prompt)
        with self._lock:
            return self.scheduler.explain(token_ids, Namespace(namespace) if isinstance(namespace, str) else namespace)

    def engine_stats(self) -> EngineStats:
        with self._lock:
            counted, cache = self.scheduler.stats(), self.scheduler.cache.stats()
        return EngineStats(
            total_requests=counted.total_requests, completed_requests=counted.completed_requests,
            failed_requests=counted.failed_requests, aborted_requests=counted.aborted_requests,
            total_tokens_generated=counted.total_tokens_generated,
            avg_queue_time_ms=counted.avg_queue_ms, avg_prefill_time_ms=counted.avg_prefill_ms,
            avg_decode_time_ms=counted.avg_decode_ms, queue_size=counted.queue_size, queue_capacity=counted.queue_capacity,
            concurrent_requests=counted.concurrent_requests, cache_hits=cache.hits, cache_misses=cache.misses,
        )

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
        """Change options while requests run; nothing of them is lost. Returns those that can be changed, as they are now."""
        check_running_options(changes)
        config, scheduler = self.config.replace(**changes), self.scheduler
        check_running_values(config)
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
            self.config = config
        return {name: getattr(config, name) for name in RUNNING_OPTIONS}

    def queue_status(self) -> dict[str, Any]:
        with self._lock:
            return self.scheduler.queue_status()

    def close(self) -> None:
        """Abort what runs, refuse further work and give the memory of blocks back."""
        with self._turn:
            if self._is_closed:
                return
            self._is_closed = True
            for request_id in list(self._live):
                self.scheduler.abort(request_id)
            while self._is_stepping:
                self._turn.wait()
        self._collect_down_to(0)
        self._deliver()
        if self._text_thread is not None:
            self._text_thread.submit(self._deliver).result()
        self.runner.close()
        gc.unfreeze()
        with self._turn:
            self._turn.notify_all()

    def __repr__(self) -> str:
        facts = self.facts
        memory = f"states={facts.memory.num_blocks}" if facts.has_states else f"kv_tokens={facts.memory.num_tokens}"
        return f"{type(self).__name__}({facts.name!r}, device={facts.device!r}, dtype={facts.dtype!r}, {memory})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
