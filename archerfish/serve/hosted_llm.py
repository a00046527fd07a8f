"""An LLMEngine among the models of an engine process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from archerfish.background import in_background
from archerfish.engine.counts import engine_counts
from archerfish.engine.llm_engine import LLMEngine
from archerfish.engine.outputs import TextDelta
from archerfish.errors import ArcherfishError, InvalidInputError, OverloadedError, StoppedError
from archerfish.observe.collector import MetricsCollector
from archerfish.params import SamplingParams
from archerfish.sequence import Namespace, Request
from archerfish.serve.compute import Lane
from archerfish.serve.gate import Gate, Pass
from archerfish.serve.limits import RefusedError
from archerfish.serve.model_cards import is_tts
from archerfish.serve.pending_request import ModelHost, PendingRequest, read_in_thread
from archerfish.serve.wire import Chunk, ExplainRequest, Generated, GenerationRequest, Output, Report
from archerfish.step import TokenLogprobs

PROBE_TENANT = "\0probe"  # no key's hash and no front end's name for one
MAX_QUICK_TOKENS = 8192  # a prompt of so many ids is read by the loop itself
RESERVED = ("self", "tokenizer", "messages")  # no options of a chat template
METRICS = ("queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "tokens_per_second", "num_preemptions")


class HostedLLM:
    """An LLMEngine among the models of a process."""

    kind = "generation"

    def __init__(self, engine: LLMEngine, lane: Lane, desk: ModelHost, figures: MetricsCollector, gate: Gate) -> None:
        self.engine, self.lane, self.gate = engine, lane, gate
        self.desk, self.figures = desk, figures
        self._ids = itertools.count()
        self._is_warm = False
        self._num_written = 0  # tokens, in all
        self.heard: list[tuple[Answering, TextDelta]] | None = None  # while the loop advances: what it has brought so far

    @property
    def name(self) -> str:
        return self.engine.model_name

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def card(self) -> dict[str, Any]:
        facts = self.engine.facts
        memory = {"num_states": facts.memory.num_blocks} if facts.has_states else {"kv_tokens": facts.memory.num_tokens}
        return {
            "kind": self.kind, "max_length": facts.max_len, "vocab_size": facts.vocab_size, "directory": str(facts.directory),
            "has_tokenizer": self.engine.tokenizer is not None, "has_chat_template": self._has_chat_template(),
            "is_tts": is_tts(facts), "device": facts.device, "dtype": facts.dtype,
            "max_prompt_bytes": self.engine.config.max_prompt_bytes, **memory,
        }  # fmt: skip

    def _has_chat_template(self) -> bool:
        try:
            return self.engine.tokenizer is not None and self.engine.chat_template is not None
        except ArcherfishError:
            return False

    def submit(self, ticket: PendingRequest) -> None:
        """Take in a GenerationRequest: at once where it is only ids, else by way of the reader."""
        message: GenerationRequest = ticket.message
        if not isinstance(message, GenerationRequest):
            raise InvalidInputError(f"{self.name} writes text; it has no vectors.", hint="Name an embedding model.")
        answering = Answering(self, ticket)
        if ticket.on_end is None:
            answering.entry = self._admit(ticket, message)
            ticket.release = answering.entry.ended
        ids, has_grammar = message.token_ids, "grammar" in message.params
        if ids is not None and len(ids) <= MAX_QUICK_TOKENS and not has_grammar:
            self._enter(self._prepare(answering), answering)
            return

        def read() -> Callable[[], None]:
            live = self._prepare(answering)
            return lambda: self._enter(live, answering)

        read_in_thread(self.desk, ticket, read, self.desk.compiler if has_grammar else None)

    def _admit(self, ticket: PendingRequest, message: GenerationRequest) -> Pass:
        """Before anything is spent on its text. Parameters that are wrong are told later, by who reads them."""
        params, ids = message.params, message.token_ids
        max_tokens, num_sequences = most_tokens(params), params.get("n", 1)
        left_s = ticket.left_s(self.desk.clock())
        most = max_tokens if type(max_tokens) is int and max_tokens > 0 else None
        if message.deadline_s is not None and message.deadline_s > 0:
            self.gate.check_deadline(message.deadline_s, most)
        try:
            return self.gate.admit(
                ticket.caller, max_tokens=most,
                num_sequences=num_sequences if type(num_sequences) is int and num_sequences > 0 else 1,
                num_prompt_tokens=None if ids is None else len(ids), num_prompt_bytes=size_of_prompt(message),
                deadline_s=left_s if left_s is None or left_s > 0 else None,
            )
        except RefusedError as error:
            self.figures.refused(self.name, error.code)
            raise

    def _prepare(self, answering: Answering) -> Request:
        """In any thread."""
        message = answering.message
        params = read_params(message.params)
        given = [name for name in ("prompt", "token_ids", "messages") if getattr(message, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise InvalidInputError(f"Give one of prompt, token_ids and messages, not {found}.")
        prompt = message.prompt if message.prompt is not None else message.token_ids
        if message.messages is not None:
            if not self._has_chat_template():
                raise InvalidInputError(f"{self.name} was not made for conversations.", hint="Send prompt or token_ids.")
            reserved = [name for name in RESERVED if name in message.template_options]
            if reserved:
                raise InvalidInputError(f"A chat template has no option {reserved[0]!r}.")
            prompt = self.engine.render_chat(message.messages, **message.template_options)
            params = self.engine.chat_template.stopping(params)
        assert prompt is not None
        return self.engine.prepare_request(
            prompt, params, listener=answering.hear, wants_text=not message.wants_ids, request_id=f"host-{next(self._ids)}",
            priority=answering.ticket.caller.capped(message.priority), namespace=Namespace(answering.ticket.tenant),
            deadline_s=answering.ticket.left_s(self.desk.clock()),
        )

    def _enter(self, live: Request, answering: Answering) -> None:
        answering.live, entry = live, answering.entry
        try:
            if entry is not None:
                entry.tokenized(len(live.prompt_token_ids))
            self.engine.submit(live)
        except OverloadedError as error:
            self.figures.refused(self.name, error.code)
            raise
        answering.is_heard_in_loop = not live.collector.has_text
        answering.is_plain = answering.message.stream and entry is not None
        answering.ticket.end_sequence = lambda index: self.engine.abort(live.request_id, index)
        answering.ticket.release = lambda: self._release(live.request_id, entry)

    def _release(self, request_id: str, entry: Pass | None) -> None:
        self.engine.abort(request_id)
        if entry is not None:
            entry.ended()

    def advance(self) -> bool:
        """Launch and take in steps; whether there was anything to do."""
        heard = self.heard = []
        try:
            has_moved = self.engine.advance()
        finally:
            self.heard = None
            self._tell(heard)
        if has_moved:
            done = self.engine.scheduler.tokens_done
            if done[1] != self._num_written:  # a step has succeeded, also of a device, which is no job of the lane
                self._num_written, self.lane.last_done = done[1], self.desk.clock()
            self.gate.watch(*done)
        return has_moved

    def _tell(self, heard: list[tuple[Answering, TextDelta]]) -> None:
        """Answer with all that was heard: one look at the clock and one lock for a step, and little for a token."""
        if not heard:
            return
        now, answer = self.desk.clock(), self.desk.answer
        gaps: list[float] = []
        for answering, delta in heard:
            last = answering.last_token
            if not last or not answering.is_plain or delta.finish_reason is not None or delta.logprobs is not None:
                answering.tell(delta, now)
            elif not answering.ticket.is_over:
                token_ids, entry = delta.token_ids, answering.entry
                assert entry is not None
                entry.num_output += len(token_ids)
                gaps.append(now - last)
                answering.last_token = now
                answer(answering.ticket, Chunk(request_id=answering.message.request_id, index=delta.index, token_ids=token_ids))
        self.figures.gaps(self.name, gaps)

    def use_idle_time(self) -> bool:
        if not self._is_warm:
            self._is_warm = True
            in_background(self._warm_up, "grammar-warm-up", daemon=True)
        return self.engine.use_idle_time()

    def _warm_up(self) -> None:
        """The first grammar finds the vocabulary read; a model that can have none says so when one comes."""
        with contextlib.suppress(ArcherfishError):
            self.engine.grammars.warm_up()

    def probe(self, ticket: PendingRequest) -> None:
        """Answer after a real step: one token after one token."""
        vocab_size, number = self.engine.facts.vocab_size, next(self._ids)
        prompt = [number % vocab_size, number // vocab_size % vocab_size]  # a new one each time: no cache has it
        params = {"max_tokens": 1, "temperature": 0.0}
        ticket.message = GenerationRequest(request_id="", token_ids=prompt, params=params, wants_ids=True)
        ticket.tenant = PROBE_TENANT
        self.submit(ticket)

    def explain(self, ticket: PendingRequest) -> None:
        message: ExplainRequest = ticket.message
        prompt = message.prompt if message.prompt is not None else message.token_ids
        if prompt is None or (message.prompt is not None and message.token_ids is not None):
            raise InvalidInputError("Give one of prompt and token_ids.")

        def read() -> Callable[[], None]:
            record = self.engine.explain(prompt, Namespace(ticket.tenant))
            report = Report(request_id=message.request_id, values={**asdict(record), "text": record.explain()})
            return lambda: self.desk.answer(ticket, report)

        read_in_thread(self.desk, ticket, read)

    def configure(self, options: dict[str, Any]) -> dict[str, Any]:
        changed = self.engine.configure(**options)
        self.gate.set_queue(self.engine.config.max_queue_size)
        return changed

    def stats(self) -> dict[str, Any]:
        return {
            **engine_counts(self.engine), "admission": self.gate.admission.figures(),
            "jobs": self.lane.num_done, "busy_s": self.lane.busy_s,
        }  # fmt: skip

    def close(self) -> None:
        self.engine.close()


@dataclass(eq=False, slots=True)
class Answering:
    """Turns what an engine brings to one request into the answers that its client wants."""

    model: HostedLLM
    ticket: PendingRequest
    message: GenerationRequest = field(init=False)
    live: Request | None = None
    entry: Pass | None = None
    last_token: float = 0.0
    is_heard_in_loop: bool = False  # as what brings no text is: it may wait for the end of a step
    is_plain: bool = False  # answered with a Chunk for each token

    def __post_init__(self) -> None:
        self.message = self.ticket.message

    def hear(self, delta: TextDelta) -> None:
        """In the loop, or where text is made."""
        heard = self.model.heard
        if heard is not None and self.is_heard_in_loop:
            heard.append((self, delta))
        else:
            self.tell(delta, self.model.desk.clock())

    def tell(self, delta: TextDelta, now: float) -> None:
        """Answer with what has come."""
        ticket, desk = self.ticket, self.model.desk
        if ticket.is_over:
            return
        is_first = not self.last_token
        if self.entry is not None:
            self.entry.num_output += len(delta.token_ids)
            if is_first and delta.token_ids:
                desk.post(self.entry.started)
        if delta.token_ids and ticket.on_end is None:
            since = ticket.arrived if is_first else self.last_token
            self.model.figures.token(self.model.name, now - since, is_first=is_first)
            self.last_token = now
        if self.message.stream:
            desk.answer(ticket, self._chunk(delta, is_first))
        if delta.output is not None:
            self._end(delta)

    def _chunk(self, delta: TextDelta, is_first: bool) -> Chunk:
        chunk = Chunk(
            request_id=self.message.request_id, index=delta.index, token_ids=delta.token_ids, finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if not self.message.wants_ids:
            chunk.text = delta.text
        if delta.logprobs is not None:
            chunk.logprobs = flat(delta.logprobs)
        if is_first and self.live is not None and 0 in self.live.collector.sequences:
            chunk.num_cached_tokens = self.live.collector.sequences[0].num_cached
        if delta.finish_reason == "deadline" and not self.last_token:
            chunk.retry_after_s = self.model.gate.retry_after_s()
        return chunk

    def _end(self, delta: TextDelta) -> None:
        result, message = delta.output, self.message
        assert result is not None
        reasons = {output.finish_reason for output in result.outputs}
        if self.entry is not None:
            self.entry.reason = result.finish_reason or "abort"
        if self.ticket.on_end is None:
            self.model.figures.ended(self.model.name, result)
        if "error" in reasons:
            error = next((output.error for output in result.outputs if output.error is not None), None)
            self.model.desk.fail(self.ticket, error or RuntimeError("a sequence ended with an error"))
            return
        if "abort" in reasons:  # not by the client: its ticket would be over
            error = StoppedError("The engine was stopped before the answer was complete.", hint="Send the request again.")
            self.model.desk.fail(self.ticket, error)
            return
        answer = Generated(
            request_id=message.request_id, model=self.model.name, num_prompt_tokens=len(result.prompt_token_ids),
            num_output_tokens=result.metrics.num_output_tokens, num_cached_tokens=result.num_cached_tokens,
            metrics={name: getattr(result.metrics, name) for name in METRICS},
        )
        for output in result.outputs:
            told = Output(
                index=output.index, finish_reason=output.finish_reason, stop_reason=output.stop_reason,
                cumulative_logprob=output.cumulative_logprob,
            )
            if not message.stream:
                told.token_ids, told.text = output.token_ids, "" if message.wants_ids else output.text
                told.logprobs = None if output.logprobs is None else flat(output.logprobs)
            answer.outputs.append(told)
        if "deadline" in reasons and not self.last_token:
            answer.retry_after_s = self.model.gate.retry_after_s()
        if message.token_ids is None:
            answer.prompt_token_ids = result.prompt_token_ids
        if result.prompt_logprobs is not None:
            answer.prompt_logprobs = flat(result.prompt_logprobs)
        self.model.desk.answer(self.ticket, answer)


def size_of_prompt(message: GenerationRequest) -> int:
    """About how many bytes of text, without a look at each."""
    if message.messages is not None:
        return sum(len(str(part.get("content", ""))) for part in message.messages)
    return len(message.prompt or "")


def most_tokens(params: dict[str, Any]) -> Any:
    """Of one sequence, as parameters that nobody has checked say it."""
    stages = params.get("stages")
    if isinstance(stages, list) and stages:
        counts = [stage.get("num_tokens") for stage in stages if isinstance(stage, dict)]
        return sum(count for count in counts if type(count) is int and count > 0)
    return params.get("max_tokens", SamplingParams.max_tokens)


def flat(logprobs: Sequence[TokenLogprobs]) -> list[tuple[int, float, int, list[tuple[int, float]]]]:
    return [(one.token_id, one.logprob, one.rank, one.top) for one in logprobs]


def read_params(given: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.of(given)
    except TypeError as error:
        raise InvalidInputError(f"The sampling parameters cannot be read: {error}.") from None
