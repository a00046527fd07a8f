"""An embedding model or cross-encoder among the models of an engine process."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from archerfish.engine.packing import TokenizedText
from archerfish.errors import (
    ArcherfishError,
    InvalidInputError,
    OverloadedError,
    StoppedError,
    UnknownOptionError,
    UnsupportedModelError,
)
from archerfish.serve.admission import TooLateError
from archerfish.serve.compute import Lane
from archerfish.serve.figures import Figures
from archerfish.serve.gate import ReadingGate, ReadingPass
from archerfish.serve.limits import RefusedError
from archerfish.serve.ticket import MAX_RETRY_AFTER_S, Desk, Ticket, read_aside
from archerfish.serve.wire import Embed, Score, Vectors

Array = npt.NDArray[np.float32]
FIRST_BUDGET, LEAST_BUDGET, MOST_BUDGET = 1024, 64, 1 << 16  # tokens of a job
MAX_JOB_TEXTS = 2048


class Encoder(Protocol):
    """What is asked of an engine of vectors; ArrowEngine has it."""

    model_name: str

    @property
    def is_cross_encoder(self) -> bool: ...
    def tokenize(self, texts: Sequence[Any], /) -> list[TokenizedText]: ...
    def compute(self, texts: Sequence[TokenizedText], normalize: bool | None = ..., /) -> Array: ...
    def get_embedding_dimension(self) -> int: ...
    def get_max_seq_length(self) -> int: ...
    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class Encoding:
    """The texts of one request on their way through jobs."""

    ticket: Ticket
    texts: list[TokenizedText]
    normalize: bool | None
    finish: Callable[[Array], Array]
    rows: Array | None = None
    num_taken: int = 0
    num_done: int = 0
    is_alone: bool = False  # after a job with others has failed
    entry: ReadingPass | None = None
    deadline: float = math.inf

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)


Job = list[tuple[Encoding, int]]


def size_of(text: Any) -> int:
    """About how many bytes of text, of one or of a pair; token ids are none."""
    if isinstance(text, str):
        return len(text)
    return sum(map(len, text)) if isinstance(text, tuple) else 0


class HostedEncoder:
    """An embedding model or cross-encoder among the models of a process.

    Texts of all requests that wait go into jobs together, one text of each request in turn, so that a long list delays a short
    one little. A job has as many tokens as take `latency_s` at the rate measured last.
    """

    def __init__(
        self, engine: Encoder, lane: Lane, desk: Desk, figures: Figures, gate: ReadingGate, *, latency_s: float = 0.05,
        max_queue_texts: int = 8192, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.lane, self.gate = engine, lane, gate
        self.kind = "cross-encoder" if engine.is_cross_encoder else "embedding"
        self.latency_s, self.max_queue_texts = latency_s, max_queue_texts
        self.budget = FIRST_BUDGET
        self.num_queued = 0  # texts of requests that are not done, on their way through the reader included
        self.num_texts = self.num_tokens = 0  # computed
        self._desk, self._figures, self._clock = desk, figures, clock
        self._queue: deque[Encoding] = deque()
        self._running: tuple[Job, Future[tuple[Array, float]]] | None = None
        self._tokens_per_s = 0.0

    @property
    def name(self) -> str:
        return self.engine.model_name

    @property
    def has_work(self) -> bool:
        return self._running is not None or bool(self._queue)

    def card(self) -> dict[str, Any]:
        directory = str(getattr(self.engine, "directory", ""))
        shown = {"kind": self.kind, "max_length": self.engine.get_max_seq_length(), "directory": directory}
        return shown if self.kind == "cross-encoder" else {**shown, "dimension": self.engine.get_embedding_dimension()}

    def submit(self, ticket: Ticket) -> None:
        inputs, normalize, finish = self._wishes(ticket.message)
        if self.num_queued + len(inputs) > self.max_queue_texts and self.num_queued:
            self._figures.refused(self.name, OverloadedError.code)
            raise OverloadedError(f"The queue of {self.name} is full: {self.num_queued:,} texts wait.")
        entry = self._admit(ticket, inputs) if ticket.on_end is None else None
        self.num_queued += len(inputs)
        ticket.release = lambda: self._leave(len(inputs), entry)

        def read() -> Callable[[], None]:
            encoding = Encoding(ticket, self.engine.tokenize(inputs), normalize, finish, entry=entry)
            if ticket.message.deadline_s is not None:
                encoding.deadline = ticket.arrived + ticket.message.deadline_s
            return lambda: self._enter(encoding)

        read_aside(self._desk, ticket, read)

    def _admit(self, ticket: Ticket, inputs: Sequence[Any]) -> ReadingPass:
        """Before anything is spent on the texts."""
        num_tokens = sum(len(text) for text in inputs if isinstance(text, list))
        num_bytes = sum(size_of(text) for text in inputs)
        deadline_s = ticket.message.deadline_s
        if deadline_s is not None and not deadline_s > 0:
            raise InvalidInputError(f"deadline_s must be above 0, not {deadline_s:g}.")
        try:
            return self.gate.admit(
                ticket.caller, len(inputs), num_tokens=num_tokens, num_bytes=num_bytes, deadline_s=deadline_s
            )
        except RefusedError as error:
            self._figures.refused(self.name, error.code)
            raise

    def _wishes(self, message: Any) -> tuple[list[Any], bool | None, Callable[[Array], Array]]:
        """What to compute for a request, how, and what to make of it."""
        if isinstance(message, Embed):
            if self.kind == "cross-encoder":
                raise InvalidInputError(f"{self.name} is a cross-encoder: it scores pairs.", hint="Name an embedding model.")
            return list(message.texts), message.normalize, lambda rows: rows
        if not isinstance(message, Score):
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
            encoding.ticket.release = lambda: self._leave(len(encoding.texts), encoding.entry, encoding)
            self._queue.append(encoding)
        else:
            self._desk.answer(encoding.ticket, Vectors(request_id=encoding.ticket.message.request_id, model=self.name))

    def _leave(self, num_texts: int, entry: ReadingPass | None, encoding: Encoding | None = None) -> None:
        """A request is over, answered or not."""
        self.num_queued -= num_texts
        if entry is not None:
            entry.ended()
        if encoding is not None and encoding.num_taken < len(encoding.texts):
            self._queue = deque(one for one in self._queue if one is not encoding)

    def advance(self) -> bool:
        """Take in the job that is done and start the next; whether there was anything to do."""
        has_moved = False
        if self._running is not None and self._running[1].done():
            job, future = self._running
            self._running = None
            self._take_in(job, future)
            has_moved = True
        if self._running is None and self._queue:
            self._drop_late()
        if self._running is None and self._queue:
            job = self._next_job()
            texts = [encoding.texts[place] for encoding, place in job]
            self._running = job, self.lane.submit(self._compute, texts, job[0][0].normalize)
            has_moved = True
        return has_moved

    def use_idle_time(self) -> bool:
        return False  # nothing is left for later here

    def _compute(self, texts: list[TokenizedText], normalize: bool | None) -> tuple[Array, float]:
        """In the compute thread."""
        started = self._clock()
        rows = self.engine.compute(texts, normalize)
        return rows, self._clock() - started

    def _drop_late(self) -> None:
        """Nobody waits any more for what has not begun at its deadline."""
        now = self._clock()
        late = [encoding for encoding in self._queue if encoding.deadline <= now and not encoding.num_taken]
        for encoding in late:
            if encoding.entry is not None:
                encoding.entry.is_late = True
            self._figures.refused(self.name, TooLateError.code)
            message = "The deadline of this request passed before its turn."
            self._desk.fail(encoding.ticket, TooLateError(message, self.gate.wait_s(len(encoding.texts))))
        if late:
            self._queue = deque(encoding for encoding in self._queue if encoding.num_taken or encoding.deadline > now)

    def _next_job(self) -> Job:
        """One text of each request in turn, while the budget lasts; what does not fit is first next time."""
        queue, room = self._queue, self.budget
        first, num_passed = queue[0], 0
        job: Job = []
        while num_passed < len(queue) and len(job) < MAX_JOB_TEXTS:
            encoding = queue[0]
            size = len(encoding.texts[encoding.num_taken].token_ids)
            is_apart = encoding is not first and (
                encoding.is_alone or first.is_alone or encoding.normalize is not first.normalize
            )
            if job and (size > room or is_apart):
                queue.rotate(-1)
                num_passed += 1
                continue
            job.append((encoding, encoding.num_taken))
            encoding.num_taken += 1
            room -= size
            num_passed = 0
            queue.popleft()
            if encoding.num_taken < len(encoding.texts):
                queue.append(encoding)
        return job

    def _take_in(self, job: Job, future: Future[tuple[Array, float]]) -> None:
        error = future.exception()
        if error is not None:
            self._fail(job, error)
            return
        rows, seconds = future.result()
        num_tokens = sum(len(encoding.texts[place].token_ids) for encoding, place in job)
        self.num_texts += len(job)
        self.num_tokens += num_tokens
        self._adapt(num_tokens, seconds)
        self.gate.observe(num_tokens)
        for row, (encoding, place) in zip(rows, job, strict=True):
            if encoding.ticket.is_over:
                continue
            if encoding.rows is None:
                encoding.rows = np.empty((len(encoding.texts), rows.shape[1]), np.float32)
            encoding.rows[place] = row
            encoding.num_done += 1
            if encoding.num_done == len(encoding.texts):
                self._finish(encoding, encoding.rows)

    def _adapt(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        rate = num_tokens / seconds
        self._tokens_per_s = rate if not self._tokens_per_s else self._tokens_per_s + (rate - self._tokens_per_s) / 4
        if num_tokens * 2 >= self.budget or seconds > self.latency_s:  # a small job says little about large ones
            self.budget = max(LEAST_BUDGET, min(MOST_BUDGET, int(self._tokens_per_s * self.latency_s)))

    def _finish(self, encoding: Encoding, rows: Array) -> None:
        ticket = encoding.ticket
        try:
            found = np.ascontiguousarray(encoding.finish(rows), dtype="<f4")
        except ArcherfishError as error:
            self._desk.fail(ticket, error)
            return
        self._figures.embedded(self.name, self._clock() - ticket.arrived)
        self._desk.answer(ticket, Vectors(
            request_id=ticket.message.request_id, model=self.name, num_rows=found.shape[0], num_columns=found.shape[1],
            data=found.tobytes(), num_tokens=encoding.num_tokens,
        ))  # fmt: skip

    def _fail(self, job: Job, error: BaseException) -> None:
        """A job that failed is tried again request by request, so that one fails alone."""
        encodings = list(dict.fromkeys(encoding for encoding, _ in job if not encoding.ticket.is_over))
        if len(encodings) == 1:
            self._desk.fail(encodings[0].ticket, error)
            self._queue = deque(encoding for encoding in self._queue if encoding is not encodings[0])
            return
        for encoding in encodings:
            encoding.is_alone = True
            encoding.num_taken = encoding.num_done = 0
            if encoding not in self._queue:
                self._queue.append(encoding)

    def retry_after_s(self) -> float:
        waiting = sum(encoding.num_tokens for encoding in self._queue)
        return max(1.0, min(MAX_RETRY_AFTER_S, math.ceil(waiting / self._tokens_per_s))) if self._tokens_per_s else 1.0

    def probe(self, ticket: Ticket) -> None:
        """Answer after a real pass over one word."""
        if self.kind == "cross-encoder":
            ticket.message = Score(request_id="", query="health", documents=["health"])
        else:
            ticket.message = Embed(request_id="", texts=["health"])
        self.submit(ticket)

    def explain(self, ticket: Ticket) -> None:
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
            "num_tokens": self.num_tokens, "tokens_per_second": self._tokens_per_s, "job_tokens": self.budget,
            "jobs": self.lane.num_done, "busy_s": self.lane.busy_s,
        }  # fmt: skip

    def close(self) -> None:
        for encoding in self._queue:
            self._desk.fail(encoding.ticket, StoppedError("The model was stopped before its answer was complete."))
        self._queue.clear()
        self.engine.close()
