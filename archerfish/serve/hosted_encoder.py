"""An embedding model or cross-encoder among the models of an engine process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from archerfish.errors import InvalidInputError, StoppedError, UnknownOptionError, UnsupportedModelError
from archerfish.observe.collector import MetricsCollector
from archerfish.serve.admission import BusyError, ImpossibleDeadlineError, TooLateError
from archerfish.serve.compute import Lane
from archerfish.serve.gate import ReadingGate, ReadingPass
from archerfish.serve.limits import RefusedError
from archerfish.serve.pending_request import ModelHost, PendingRequest, read_in_thread
from archerfish.serve.service_rate import JobCost
from archerfish.serve.wire import EmbedRequest, ScoreRequest, Vectors
from archerfish.text.tokenizer import TokenizedText

Array = npt.NDArray[np.float32]
FIRST_BUDGET, LEAST_BUDGET, MOST_BUDGET = 1024, 64, 1 << 16  # tokens of a job
ALONE = 2.0  # times the latency that a job may take while no other model computes: larger ones waste less
BESIDE = 2.0  # times that, for a job on one of several cores: what waits behind it waits longer in any case
COMPANY_S = 1.0  # for which a model that has computed may go on
MAX_JOB_TEXTS = 2048
MAX_QUICK_BYTES = 1024  # texts of so many are read by the loop itself: less work than to hand them to another thread


class Encoder(Protocol):
    """What is asked of an engine of vectors; ArrowEngine has it."""

    model_name: str

    @property
    def is_cross_encoder(self) -> bool: ...
    def tokenize(self, texts: Sequence[Any], /) -> list[TokenizedText]: ...
    @property
    def num_workers(self) -> int: ...
    def compute(self, texts: Sequence[TokenizedText], normalize: bool | None = ..., /) -> Array: ...
    def begin(self, texts: Sequence[TokenizedText], normalize: bool | None = ..., /) -> Future[Array]: ...
    def get_embedding_dimension(self) -> int: ...
    def get_max_seq_length(self) -> int: ...
    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class Encoding:
    """The texts of one request on their way through jobs."""

    ticket: PendingRequest
    texts: list[TokenizedText]
    normalize: bool | None
    finish: Callable[[Array], Array]
    entry: ReadingPass | None
    rows: Array | None = None
    num_taken: int = 0
    num_done: int = 0
    is_alone: bool = False  # after a job with others has failed
    is_tried_again: bool = False  # as another one, alone: what jobs still bring for this one is too late
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(len(text.token_ids) for text in self.texts)


Job = list[tuple[Encoding, int]]
Done = tuple[Array, float]  # rows, and the seconds that they took, or would have taken on all cores


def size_of(text: Any) -> int:
    """About how many bytes of text, of one or of a pair; token ids are none."""
    if isinstance(text, str):
        return len(text)
    return sum(map(len, text)) if isinstance(text, tuple) else 0


class HostedEncoder:
    """An embedding model or cross-encoder among the models of a process.

    Texts of all requests that wait go into jobs together, one text of each request in turn, so that a long list delays a short
    one little. A job has as many tokens as take `latency_s`, or more where so few would hardly be worth a job (`JobCost`), or
    where no other model would have to wait for it. While more than that waits, and nobody else computes, each core has a job of
    its own: cores that wait for one another at every step lose twice what other processes take of one of them.
    """

    def __init__(
        self, engine: Encoder, lane: Lane, desk: ModelHost, figures: MetricsCollector, gate: ReadingGate, *,
        latency_s: float = 0.05, max_queue_texts: int = 8192,
    ) -> None:
        self.engine, self.lane, self.gate = engine, lane, gate
        self.kind = "cross-encoder" if engine.is_cross_encoder else "embedding"
        self.latency_s, self.max_queue_texts = latency_s, max_queue_texts
        self.budget = FIRST_BUDGET
        self.num_queued = 0  # texts of requests that are not done, on their way through the reader included
        self.num_texts = self.num_tokens = 0  # computed
        self._desk, self._figures, self._clock = desk, figures, desk.clock
        self._queue: deque[Encoding] = deque()  # those of which a job has not had all texts; requests may be over
        self._running: list[tuple[Job, Future[Done]]] = []
        self._given: Future[Any] | None = None  # to the compute thread, which is free for the next when this is done
        self._cost = JobCost()

    @property
    def name(self) -> str:
        return self.engine.model_name

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queue)

    def card(self) -> dict[str, Any]:
        directory = str(getattr(self.engine, "directory", ""))
        shown = {"kind": self.kind, "max_length": self.engine.get_max_seq_length(), "directory": directory}
        return shown if self.kind == "cross-encoder" else {**shown, "dimension": self.engine.get_embedding_dimension()}

    def submit(self, ticket: PendingRequest) -> None:
        inputs, normalize, finish = self._wishes(ticket.message)
        num_tokens = sum(len(text) for text in inputs if isinstance(text, list))
        num_bytes = sum(size_of(text) for text in inputs)
        entry = None if ticket.on_end is not None else self._admit(ticket, len(inputs), num_tokens, num_bytes)
        self.num_queued += len(inputs)
        ticket.release = lambda: self._leave(len(inputs), entry)

        def read() -> Callable[[], None]:
            encoding = Encoding(ticket, self.engine.tokenize(inputs), normalize, finish, entry)
            return lambda: self._enter(encoding)

        if num_bytes + num_tokens <= MAX_QUICK_BYTES:
            read()()
        else:
            read_in_thread(self._desk, ticket, read)

    def _admit(self, ticket: PendingRequest, num_texts: int, num_tokens: int, num_bytes: int) -> ReadingPass:
        """Before anything is spent on the texts."""
        deadline_s = ticket.message.deadline_s
        if deadline_s is not None and not deadline_s > 0:
            raise InvalidInputError(f"deadline_s must be above 0, not {deadline_s:g}.")
        alone_s = self._cost.least_seconds(self.gate.estimate_tokens(num_tokens, num_bytes))
        if deadline_s is not None and alone_s > deadline_s:
            raise ImpossibleDeadlineError(deadline_s, alone_s, hint=" or fewer texts" if num_texts > 1 else "")
        left_s = ticket.left_s(self._clock())
        try:
            if self.num_queued + num_texts > self.max_queue_texts and self.num_queued:
                wait_s = self.gate.retry_after_s()
                raise BusyError(f"The queue of {self.name} is full: {self.num_queued:,} texts wait.", wait_s)
            return self.gate.admit(ticket.caller, num_texts, num_tokens=num_tokens, num_bytes=num_bytes, deadline_s=left_s)
        except RefusedError as error:
            self._figures.refused(self.name, error.code)
            raise

    def _wishes(self, message: Any) -> tuple[list[Any], bool | None, Callable[[Array], Array]]:
        """What to compute for a request, how, and what to make of it."""
        if isinstance(message, EmbedRequest):
            if self.kind == "cross-encoder":
                raise InvalidInputError(f"{self.name} is a cross-encoder: it scores pairs.", hint="Name an embedding model.")
            return list(message.texts), message.normalize, lambda rows: rows
        if not isinstance(message, ScoreRequest):
            raise InvalidInputError(f"{self.name} writes no text; it has vectors.", hint="Name a generation model.")
        if not message.documents:
            return [], True, lambda rows: rows
        if self.kind == "cross-encoder":
            return [(message.query, document) for document in message.documents], None, self._one_label
        return [message.query, *message.documents], True, lambda rows: rows[1:] @ rows[:1].T

    def _one_label(self, rows: Array) -> Array:
        if rows.shape[1] != 1:
            raise UnsupportedModelError(f"{self.name} gives {rows.shape[1]} labels per pair; ranking needs one.")
        return rows

    def _enter(self, encoding: Encoding) -> None:
        if encoding.entry is not None:
            encoding.entry.tokenized(encoding.num_tokens)
        if encoding.texts:
            self._queue.append(encoding)
        else:
            self._desk.answer(encoding.ticket, Vectors(request_id=encoding.ticket.message.request_id, model=self.name))

    def _leave(self, num_texts: int, entry: ReadingPass | None) -> None:
        """A request is over, answered or not."""
        self.num_queued -= num_texts
        if entry is not None:
            entry.ended()

    def advance(self) -> bool:
        """Take in the jobs that are done and start the next; whether there was anything to do."""
        ended = [running for running in self._running if running[1].done()]
        computed: list[tuple[Job, Array]] = []
        if ended:
            self._running = [running for running in self._running if running not in ended]
        for job, future in ended:
            if (error := future.exception()) is not None:
                self._fail(job, error)
            else:
                rows, seconds = future.result()
                self._learn(job, seconds)
                computed.append((job, rows))
        has_started = self._start()
        for job, rows in computed:
            self._take_in(job, rows)  # while the next is computed
        return has_started or bool(ended)

    def _start(self) -> bool:
        """Begin the next job, if there is one and a core for it."""
        if not self._queue or (self._given is not None and not self._given.done()):
            return False
        num_beside = self._choose_budget()
        self._drop_vain(num_beside)
        if not self._queue:
            return False
        job = self._next_job()
        texts, normalize = [encoding.texts[place] for encoding, place in job], job[0][0].normalize
        if num_beside > 1:
            done: Future[Done] = Future()
            self._given = self.lane.submit(self._begin, texts, normalize, done)
        else:
            self._given = done = self.lane.submit(self._compute, texts, normalize)
        self._running.append((job, done))
        return True

    def use_idle_time(self) -> bool:
        return False  # nothing is left for later here

    def _compute(self, texts: list[TokenizedText], normalize: bool | None) -> tuple[Array, float]:
        """In the compute thread."""
        started = self._clock()
        rows = self.engine.compute(texts, normalize)
        return rows, self._clock() - started

    def _begin(self, texts: list[TokenizedText], normalize: bool | None, done: Future[Done]) -> None:
        """In the compute thread, until there is a core for the next."""
        started = self._clock()

        def pass_on(begun: Future[Array]) -> None:
            if (error := begun.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result((begun.result(), (self._clock() - started) / self.engine.num_workers))
            self.lane.wake()

        try:
            self.engine.begin(texts, normalize).add_done_callback(pass_on)
        except BaseException as error:
            done.set_exception(error)

    def _choose_budget(self) -> int:
        """How large the next job may be, and how many are to run side by side: one a core where there is enough for each."""
        if not self.num_texts:
            return 1
        has_company = self.lane.has_company(COMPANY_S)
        seconds = self.latency_s if has_company else ALONE * self.latency_s
        num_beside = 1 if has_company else self.engine.num_workers
        if num_beside > 1:
            on_core = self._cost.worthwhile(BESIDE * seconds / num_beside)
            num_waiting = sum(encoding.num_tokens for encoding in self._queue)
            if self._running or num_waiting > num_beside * on_core:
                self._set_budget(min(on_core, self.gate.num_tokens / num_beside))
                return num_beside
        self._set_budget(self._cost.worthwhile(seconds))
        return 1

    def _set_budget(self, num_tokens: float) -> None:
        self.budget = max(LEAST_BUDGET, int(min(MOST_BUDGET, num_tokens)))

    def _drop_vain(self, num_beside: int) -> None:
        """Leave out requests that are over, and refuse those whose next job would end after their deadline."""
        end = self._clock() + num_beside * self._cost.seconds(min(self.budget, self.gate.num_tokens))
        kept: deque[Encoding] = deque()
        for encoding in self._queue:
            ticket = encoding.ticket
            if ticket.is_over:
                continue
            if encoding.num_taken or ticket.deadline > end:
                kept.append(encoding)
                continue
            assert encoding.entry is not None
            encoding.entry.is_late = True
            self._figures.refused(self.name, TooLateError.code)
            message = "The deadline of this request passed before its turn."
            self._desk.fail(ticket, TooLateError(message, self.gate.wait_s(len(encoding.texts))))
        self._queue = kept

    def _next_job(self) -> Job:
        """One text of each request in turn, while the budget lasts; what does not fit or go together is first next time."""
        queue, room = self._queue, self.budget
        first, apart = queue[0], []
        job: Job = []
        while queue and len(job) < MAX_JOB_TEXTS:
            encoding = queue[0]
            size = len(encoding.texts[encoding.num_taken].token_ids)
            if job and size > room:
                break
            queue.popleft()
            if encoding is not first and (
                encoding.is_alone or first.is_alone or encoding.normalize is not first.normalize
            ):
                apart.append(encoding)
                continue
            job.append((encoding, encoding.num_taken))
            encoding.num_taken += 1
            room -= size
            if encoding.num_taken < len(encoding.texts):
                queue.append(encoding)
        queue.extendleft(reversed(apart))
        return job

    def _learn(self, job: Job, seconds: float) -> None:
        num_tokens = sum(len(encoding.texts[place].token_ids) for encoding, place in job)
        self.num_texts += len(job)
        self.num_tokens += num_tokens
        self._cost.add(num_tokens, seconds)
        self.gate.observe(num_tokens)

    def _take_in(self, job: Job, rows: Array) -> None:
        for row, (encoding, place) in zip(rows, job, strict=True):
            if encoding.ticket.is_over or encoding.is_tried_again:
                continue
            if encoding.rows is None:
                encoding.rows = np.empty((len(encoding.texts), rows.shape[1]), np.float32)
            encoding.rows[place] = row
            encoding.num_done += 1
            if encoding.num_done == len(encoding.texts):
                self._finish(encoding, encoding.rows)

    def _finish(self, encoding: Encoding, rows: Array) -> None:
        ticket = encoding.ticket
        try:
            found = np.ascontiguousarray(encoding.finish(rows), dtype="<f4")
        except Exception as error:
            self._desk.fail(ticket, error)
            return
        if encoding.entry is not None:
            encoding.entry.is_late = self._clock() > ticket.deadline
        self._figures.embedded(self.name, self._clock() - ticket.arrived)
        self._desk.answer(ticket, Vectors(
            request_id=ticket.message.request_id, model=self.name, num_rows=found.shape[0], num_columns=found.shape[1],
            data=found.tobytes(), num_tokens=encoding.num_tokens,
        ))  # fmt: skip

    def _fail(self, job: Job, error: BaseException) -> None:
        """A job that failed is tried again request by request, so that one fails alone."""
        encodings = dict.fromkeys(encoding for encoding, _ in job if not encoding.is_tried_again)
        self._queue = deque(encoding for encoding in self._queue if encoding not in encodings)
        is_one = all(encoding is job[0][0] for encoding, _ in job)
        for encoding in encodings:
            if is_one:
                self._desk.fail(encoding.ticket, error)
                continue
            encoding.is_tried_again = True
            self._queue.append(replace(encoding, rows=None, num_taken=0, num_done=0, is_alone=True, is_tried_again=False))

    def probe(self, ticket: PendingRequest) -> None:
        """Answer after a real pass over one word."""
        if self.kind == "cross-encoder":
            ticket.message = ScoreRequest(request_id="", query="health", documents=["health"])
        else:
            ticket.message = EmbedRequest(request_id="", texts=["health"])
        self.submit(ticket)

    def explain(self, ticket: PendingRequest) -> None:
        raise InvalidInputError(f"{self.name} has no prefix cache.", hint="Name a generation model.")

    def configure(self, options: dict[str, Any]) -> dict[str, Any]:
        known = {"latency_budget_ms": (1.0, 10_000.0), "max_queue_texts": (1, 1 << 30)}
        for name, value in options.items():
            if name not in known:
                raise UnknownOptionError(f"{name} cannot be changed.", hint=f"These can: {', '.join(known)}.")
            low, high = known[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InvalidInputError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}.")
        self.latency_s = options.get("latency_budget_ms", self.latency_s * 1000) / 1000
        self.max_queue_texts = int(options.get("max_queue_texts", self.max_queue_texts))
        return {"latency_budget_ms": self.latency_s * 1000, "max_queue_texts": self.max_queue_texts}

    def stats(self) -> dict[str, Any]:
        return {
            "queue_texts": self.num_queued, "queue_capacity": self.max_queue_texts, "num_texts": self.num_texts,
            "num_tokens": self.num_tokens, "tokens_per_second": self._cost.tokens_per_s, "job_tokens": self.budget,
            "drain_seconds": self.gate.retry_after_s(), "margin": self.gate.margin,
            "jobs": self.lane.num_done, "busy_s": self.lane.busy_s,
        }  # fmt: skip

    def close(self) -> None:
        for encoding in self._queue:
            self._desk.fail(encoding.ticket, StoppedError("The model was stopped before its answer was complete."))
        self._queue.clear()
        self.engine.close()
