"""Whether an engine process works: hung jobs are detected, and health checks are answered from real steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from archerfish.errors import StoppedError
from archerfish.serve.compute import ComputeThread
from archerfish.serve.models import GENERATION, Hosted, ModelTable
from archerfish.serve.pending_request import ModelHost, PendingRequest
from archerfish.serve.processes import Stall
from archerfish.serve.wire import Failed, Message, Ping, Pong

NEW_JOBS, NEW_FACTOR = 64, 5  # the first jobs of a model may compile kernels and get this many times hang_s
LONGEST_FACTOR = 4  # a job may take this many times as long as the longest job before it
FRESH_S = 1.0  # a step this recent proves that a model works


class HangWatch:
    """Tells whether the compute thread hangs. hang_s: the time limit of a job, unless its model has needed longer before."""

    def __init__(self, compute: ComputeThread, hang_s: float) -> None:
        self._compute, self._hang_s = compute, hang_s
        self._stall = Stall()

    def check(self, now: float, *, has_work: bool, is_loading: bool, num_moves: int = 0) -> str:
        """Return why the process hangs, or "". has_work: of the models, even if no job was made of it yet.

        num_moves: how often models made progress, which a GPU model does without jobs of the compute thread.
        """
        has_work = has_work or self._compute.has_work
        seconds = self._stall.check(now, self._compute.num_done + num_moves, has_work=has_work)
        return self.problem(seconds, is_loading=is_loading)

    def problem(self, seconds: float, *, is_loading: bool = False) -> str:
        """Return what is wrong after so many seconds without progress, or ""."""
        lane = self._compute.running_lane
        is_new = is_loading or (lane is not None and lane.num_done < NEW_JOBS)
        longest_s = 0.0 if lane is None else lane.longest_s
        if seconds <= max(self._hang_s * (NEW_FACTOR if is_new else 1), LONGEST_FACTOR * longest_s):
            return ""
        what = "There is work, but no job" if lane is None else f"A job of {lane.name} runs and none"
        return f"{what} has ended for {seconds:.0f} s."


class HealthCheck:
    """Answers Pings. With a probe, the answer comes after a real step of every loaded model that has made none recently."""

    def __init__(
        self, models: ModelTable, compute: ComputeThread, watch: HangWatch, host: ModelHost, clock: Callable[[], float]
    ) -> None:
        self._models, self._compute, self._watch, self._host, self._clock = models, compute, watch, host, clock

    def answer(self, pending: PendingRequest, message: Ping) -> None:
        pong = Pong(request_id=message.request_id)
        if message.probe is None:
            self._host.answer(pending, pong)
            return
        entries = self._models.entries if not message.probe else [self._models.find(message.probe, GENERATION)]
        running_s = self._compute.running_s()
        problem = self._watch.problem(running_s, is_loading=self._models.is_loading)
        if problem:
            raise StoppedError(problem, hint="The engine process hangs and is started again.")
        now = self._clock()
        idle = [
            entry.hosted for entry in entries
            if entry.hosted is not None and entry.lane is not None and now - entry.lane.last_done > FRESH_S
        ]  # fmt: skip
        if not idle or running_s > 0:
            self._host.answer(pending, pong)
        else:
            self._probe(idle, pending, message.request_id)

    def _probe(self, idle: list[Hosted], pending: PendingRequest, request_id: str) -> None:
        left, now = set(idle), self._clock()

        def end(hosted: Hosted, answer: Message) -> None:
            left.discard(hosted)
            if isinstance(answer, Failed):
                answer.request_id = request_id
                self._host.answer(pending, answer)
            elif not left:
                self._host.answer(pending, Pong(request_id=request_id, seconds=self._clock() - pending.arrived))

        for hosted in idle:
            step = PendingRequest(b"", Ping(request_id=""), arrived=now, on_end=partial(end, hosted))
            try:
                hosted.probe(step)
            except Exception as error:
                self._host.fail(step, error)
