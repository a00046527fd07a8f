"""An embedding model or cross-encoder of an engine process."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.config import ServeConfig
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.text_batches import ACTIVATIONS
from archerfish.engine.token_vectors import as_rows
from archerfish.errors import InvalidInputError, UnknownOptionError
from archerfish.observe.recent import RecentFigures, figures
from archerfish.route.router import ReplicaLoad
from archerfish.sched.cost import StepCost
from archerfish.serve.compute import Lane, ModelHost, PendingRequest, read_in_thread
from archerfish.serve.overload import AdmittedRequest, OverloadController, TooLateError, estimate_tokens
from archerfish.serve.tenants import ANONYMOUS
from archerfish.serve.wire import ClassifyRequest, EmbedRequest, Vectors
from archerfish.text.tokenizer import TokenizedText

Array = npt.NDArray[np.float32]
FIRST_JOB_TOKENS = 1024
MIN_JOB_TOKENS = 64
MAX_JOB_TOKENS = 1 << 16
MAX_JOB_TEXTS = 2048
ALONE_FACTOR = 4.0  # times the latency budget, for a job while no other model computes: fewer jobs cost less
ALONE_AFTER_S = 1.0  # a model that has computed within this time may go on
MAX_INLINE_SIZE = 1024  # characters and ids that the loop itself tokenises, as passing them to a thread takes longer


@dataclass(eq=False, slots=True)
class EncodingRequest:
    """The texts of one request and their results so far."""

    request: PendingRequest
    texts: list[TokenizedText]
    num_tokens: int
    options: dict[str, Any]  # of the engine's method; requests that share a job have the same
    as_probabilities: bool  # raw scores become probabilities of labels
    rows: Array | list[Array] | None = None
    num_taken: int = 0  # texts that jobs have taken
    num_done: int = 0
    is_alone: bool = False  # after a job that it shared with others has failed


Job = list[tuple[EncodingRequest, int]]  # requests, and which of their texts


class HostedEncoder:
    """An ArrowEngine that answers requests of an engine process with vectors or scores.

    Waiting texts of all requests share jobs, one text of each request in turn, so that a long list hardly delays a
    short one. A job has as many tokens as take `latency_s`, and more while no other model computes.
    """

    def __init__(self, engine: ArrowEngine, lane: Lane, host: ModelHost) -> None:
        self.engine, self.lane = engine, lane
        self.name = engine.model_name
        self.kind = "cross-encoder" if engine.is_cross_encoder else "embedding"
        owner = weakref.proxy(self)  # a cycle of references would keep an unloaded model in memory
        self.controller = OverloadController(
            rates=host.rates,
            expect=lambda request, unread: owner.expect(request, unread),
            max_queued=host.config.max_queue_texts,
            max_wait_s=host.config.admission.get("max_wait_s", 0.0),
        )
        self.outputs: tuple[str, ...] = getattr(engine, "outputs", ("dense",))
        self.latency_s = host.config.latency_budget_ms / 1000
        self.job_tokens = FIRST_JOB_TOKENS
        self.num_texts = self.num_tokens = 0  # computed
        self.recent = RecentFigures()  # the first token of a request stands for its vectors
        self._host, self._clock = host, host.clock
        self._queue: deque[EncodingRequest] = deque()  # requests with texts that no job has taken
        self._running: tuple[Job, Future[Array | list[Array]]] | None = None
        self._job_cost = StepCost()
        self.has_work = False  # whether requests wait or are computed

    def card(self) -> dict[str, Any]:
        directory = str(getattr(self.engine, "directory", ""))
        shown = {"kind": self.kind, "max_length": self.engine.get_max_seq_length(), "directory": directory}
        if self.kind == "cross-encoder":
            return shown
        return {**shown, "dimension": self.engine.get_embedding_dimension(), "outputs": self.outputs}

    # Requests

    def submit(self, request: PendingRequest) -> None:
        inputs, options, as_probabilities = self._read(request.message)
        texts = [text for one in inputs for text in (one if isinstance(one, tuple) else (one,))]  # both texts of a pair
        num_ids = sum(len(text) for text in texts if isinstance(text, list))
        num_characters = sum(len(text) for text in texts if isinstance(text, str))
        admitted: AdmittedRequest | None = None
        if request.on_end is None:  # no health check; before any work is spent on the texts
            deadline_s, num_tokens = request.message.deadline_s, num_ids + estimate_tokens(num_characters)
            if deadline_s is not None:
                if not deadline_s > 0:
                    raise InvalidInputError(f"deadline_s must be above 0, not {deadline_s:g}.")
                # Long texts are cut: they do not count as more than a job.
                self.controller.check_deadline(deadline_s, self._jobs_s(min(num_tokens, self.job_tokens)))
            left_s = request.left_s(self._clock())
            arriving = AdmittedRequest(
                request.tenant, num_tokens, len(inputs), num_sequences=0, max_tokens=0, deadline_s=left_s
            )
            admitted = self.controller.admit(arriving, is_tokenized=False)
            request.release = partial(self.controller.end, admitted)

        def read() -> Callable[[], None]:
            prompt_name = getattr(request.message, "prompt_name", None)
            texts = self.engine.tokenize(inputs, prompt_name=prompt_name)
            place = next((place for place, text in enumerate(texts) if text.is_cut), None)
            if place is not None and not getattr(request.message, "truncate", True):
                most = (
                    f"{self.engine.most_tokens(prompt_name):,} tokens, special ones included, the limit of {self.name}"
                )
                hint = "Shorten it, or leave out truncate: texts are cut then."
                raise InvalidInputError(f"Text {place} has more than {most}.", hint=hint)
            num_tokens = sum(len(text.token_ids) for text in texts)
            encoding = EncodingRequest(request, texts, num_tokens, options, as_probabilities)
            return partial(self._enqueue, encoding, admitted)

        if num_characters + num_ids <= MAX_INLINE_SIZE:
            read()()
        else:
            read_in_thread(self._host, request, read)

    def _read(self, message: Any) -> tuple[list[Any], dict[str, Any], bool]:
        """The inputs of a request, how to compute them, and whether its results become probabilities."""
        if isinstance(message, EmbedRequest):
            if self.kind == "cross-encoder":
                raise InvalidInputError(
                    f"{self.name} is a cross-encoder: it scores pairs.", hint="Name an embedding model."
                )
            if message.output not in self.outputs:
                hint = f"It has {' and '.join(self.outputs)} ones: POST /pooling gives them."
                raise InvalidInputError(f"{self.name} has no {message.output} vectors.", hint=hint)
            if message.output == "dense":
                return list(message.texts), {"normalize": message.normalize}, False
            return list(message.texts), {"output": message.output, "is_query": message.prompt_name == "query"}, False
        if not isinstance(message, ClassifyRequest):
            raise InvalidInputError(f"{self.name} generates no text; it has vectors.", hint="Name a generation model.")
        if self.kind != "cross-encoder":
            raise InvalidInputError(f"{self.name} has no labels: it embeds texts.", hint="Name a cross-encoder.")
        as_probabilities = message.as_probabilities and not message.is_raw
        return list(message.texts), {"is_raw": True} if message.is_raw or as_probabilities else {}, as_probabilities

    def _enqueue(self, encoding: EncodingRequest, admitted: AdmittedRequest | None) -> None:
        if admitted is not None:
            self.controller.set_prompt_tokens(admitted, encoding.num_tokens)
            self.controller.enter(admitted)
        if not encoding.texts:
            message = encoding.request.message
            self._host.answer(encoding.request, Vectors(request_id=message.request_id, model=self.name))
            return
        self.has_work = True
        self._queue.append(encoding)

    def probe(self, request: PendingRequest) -> None:
        """Answer after a real pass over one word."""
        if self.kind == "cross-encoder":
            request.message = ClassifyRequest(request_id="", texts=[("health", "health")])
        else:
            request.message = EmbedRequest(request_id="", texts=["health"], output=self.outputs[0])
        self.submit(request)

    # Jobs

    def advance(self) -> bool:
        """Collect the job that is done and start the next; whether there was anything to do."""
        computed: tuple[Job, Array | list[Array]] | None = None
        has_moved = False
        if self._running is not None and self._running[1].done():
            (job, future) = self._running
            self._running = None
            has_moved = True
            if (error := future.exception()) is not None:
                self._retry(job, error)
            else:
                rows = future.result()
                num_tokens = sum(len(encoding.texts[index].token_ids) for encoding, index in job)
                self.num_texts += len(job)
                self.num_tokens += num_tokens
                self._job_cost.observe(num_tokens, 0, self.lane.last_s)
                computed = job, rows
        if self._running is None and self._queue:
            self._choose_job_tokens()
            self._drop_expired()
            if self._queue:
                job, has_moved = self._next_job(), True
                texts = [encoding.texts[index] for encoding, index in job]
                self._running = job, self.lane.submit(partial(self._compute, texts, **job[0][0].options))
        if computed is not None:
            self._take_rows(*computed)  # while the next job is computed
        self.has_work = self._running is not None or bool(self._queue)
        return has_moved

    def _choose_job_tokens(self) -> None:
        """As many tokens as take `latency_s`. At least half of a job's time goes to tokens, not to its fixed cost. The
        number at most doubles: the first measurements may be far off."""
        job_s, token_s, *_ = self._job_cost.coefficients
        if token_s:
            is_alone = not self.lane.are_others_active(ALONE_AFTER_S)
            seconds = self.latency_s * (ALONE_FACTOR if is_alone else 1.0)
            most = min(MAX_JOB_TOKENS, 2 * self.job_tokens)
            self.job_tokens = max(MIN_JOB_TOKENS, int(min(most, max(seconds - job_s, job_s) / token_s)))

    def _jobs_s(self, num_tokens: float) -> float:
        """The time of as many jobs as these tokens need."""
        job_s, token_s, *_ = self._job_cost.coefficients
        return num_tokens * token_s + max(1.0, num_tokens / self.job_tokens) * job_s if num_tokens else 0.0

    def expect(self, request: AdmittedRequest, unread: list[AdmittedRequest]) -> tuple[float, float]:
        """As OverloadController.expect. Requests take turns: each has one text computed before the next turn."""
        ahead = 0.0 if self._running is None else sum(len(one.texts[i].token_ids) for one, i in self._running[0])
        queued = [(one.num_tokens / len(one.texts), len(one.texts) - one.num_taken) for one in list(self._queue)]
        queued += [(one.num_prompt_tokens / one.num_places, one.num_places) for one in unread if one.num_places]
        ahead += sum(tokens * min(num_left, request.num_places) for tokens, num_left in queued)
        turns = 2 if self.lane.are_others_active(ALONE_AFTER_S) else 1  # jobs of other models take as long
        return turns * self._jobs_s(ahead), turns * self._jobs_s(request.num_prompt_tokens)

    def _drop_expired(self) -> None:
        """Remove requests that are over, and refuse those whose next job would end after their deadline."""
        num_tokens = min(self.job_tokens, sum(encoding.num_tokens for encoding in self._queue))
        now, job_s = self._clock(), self._jobs_s(num_tokens)
        kept: deque[EncodingRequest] = deque()
        for encoding in self._queue:
            request = encoding.request
            if request.is_over:
                continue
            left_s = request.left_s(now)
            if encoding.num_taken or left_s is None or left_s > job_s:
                kept.append(encoding)
                continue
            message = "The deadline of this request would pass before its texts are computed."
            self._host.fail(request, TooLateError(message, self.controller.retry_after_s(request.tenant)))
        self._queue = kept

    def _next_job(self) -> Job:
        """One text of each request in turn, up to `job_tokens`. Requests that cannot share a job come first in the
        next."""
        queue, room = self._queue, self.job_tokens
        first, skipped = queue[0], []
        job: Job = []
        while queue and len(job) < MAX_JOB_TEXTS:
            encoding = queue[0]
            size = len(encoding.texts[encoding.num_taken].token_ids)
            if job and size > room:
                break
            queue.popleft()
            if encoding is not first and (encoding.is_alone or first.is_alone or encoding.options != first.options):
                skipped.append(encoding)
                continue
            job.append((encoding, encoding.num_taken))
            encoding.num_taken += 1
            room -= size
            if encoding.num_taken < len(encoding.texts):
                queue.append(encoding)
        queue.extendleft(reversed(skipped))
        return job

    def _compute(self, texts: list[TokenizedText], **options: Any) -> Array | list[Array]:
        if "output" not in options:
            return self.engine.compute(texts, **options)
        return [as_rows(vectors) for vectors in self.engine.compute_tokens(texts, **options)]

    def _take_rows(self, job: Job, rows: Array | list[Array]) -> None:
        for row, (encoding, index) in zip(rows, job, strict=True):
            if encoding.request.is_over:
                continue
            if encoding.rows is None:
                num, is_several = len(encoding.texts), isinstance(rows, list)
                encoding.rows = [row] * num if is_several else np.empty((num, len(row)), np.float32)
            encoding.rows[index] = row
            encoding.num_done += 1
            if encoding.num_done < len(encoding.texts):
                continue
            request, given = encoding.request, encoding.rows
            row_counts = list(map(len, given)) if isinstance(given, list) else []
            found = np.concatenate(given) if isinstance(given, list) else given
            found = ACTIVATIONS[self.engine.core.label_activation](found) if encoding.as_probabilities else found
            found = np.ascontiguousarray(found, dtype="<f4")
            now, collector = self._clock(), self._host.figures
            collector.embedded(self.name, now - request.arrived, collector.tenant_label(request.tenant.name))
            self.recent.first_token(now, now - request.arrived)
            self.recent.tokens(now, encoding.num_tokens)
            self._host.answer(
                request,
                Vectors(
                    request_id=request.message.request_id,
                    model=self.name,
                    num_rows=found.shape[0],
                    num_columns=found.shape[1],
                    data=found.tobytes(),
                    num_tokens=encoding.num_tokens,
                    row_counts=row_counts,
                    truncated=[place for place, text in enumerate(encoding.texts) if text.is_cut],
                ),
            )

    def _retry(self, job: Job, error: BaseException) -> None:
        """Compute the requests of a failed job again one by one, so that only the faulty one fails."""
        encodings = list(dict.fromkeys(encoding for encoding, _ in job))
        self._queue = deque(encoding for encoding in self._queue if encoding not in encodings)
        if len(encodings) == 1:
            self._host.fail(encodings[0].request, error)
            return
        for encoding in encodings:
            encoding.rows = None
            encoding.num_taken = 0
            encoding.num_done = 0
            encoding.is_alone = True
            self._queue.append(encoding)

    # Options and figures

    def configure(self, options: dict[str, Any]) -> dict[str, Any]:
        values = {"latency_budget_ms": self.latency_s * 1000, "max_queue_texts": self.controller.max_queued}
        for name in options:
            if name not in values:
                raise UnknownOptionError(f"{name} cannot be changed.", hint=f"These can: {', '.join(values)}.")
        changed = ServeConfig(**{**values, **options})
        self.latency_s, self.controller.max_queued = changed.latency_budget_ms / 1000, changed.max_queue_texts
        return {name: getattr(changed, name) for name in values}

    def load(self) -> ReplicaLoad:
        """For routers. The tokens of texts are those of prompts."""
        waiting: dict[str, int] = {}
        for one in self._queue:
            tenant, num_left = one.request.tenant.name, len(one.texts) - one.num_taken
            waiting[tenant] = waiting.get(tenant, 0) + one.num_tokens * num_left // len(one.texts)
        return ReplicaLoad(
            prompt_token_s=self._jobs_s(self.job_tokens) / self.job_tokens,
            step_s=self.lane.last_s if self._running is not None else 0.0,
            waiting_tokens=waiting,
            num_running=len(self._running[0]) if self._running is not None else 0,
            is_fair=True,
            num_waiting=sum(len(one.texts) - one.num_taken for one in self._queue),
        )

    def stats(self) -> dict[str, Any]:
        now = self._clock()
        return {
            "queue_texts": self.controller.num_places,
            "queue_capacity": self.controller.max_queued,
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "job_tokens": self.job_tokens,
            **figures(self.recent.since(now), now),
            "wait_seconds": self.controller.retry_after_s(ANONYMOUS),
            "jobs": self.lane.num_done,
            "busy_s": self.lane.busy_s,
            **self.engine.core.ops.compile_counts(),
        }
