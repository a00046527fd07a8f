"""Steps that are launched and not yet committed: while one computes, the next one is planned."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from archerfish.errors import StoppedError
from archerfish.runtime.runner import ModelRunner, RunningStep
from archerfish.sched.plan import Plan
from archerfish.sched.scheduler import Scheduler
from archerfish.step import StepResult


class StepPipeline:
    """Carries plans of the scheduler to the runner, and their results back. lock: over the scheduler."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner[Any], lock: threading.RLock) -> None:
        self.scheduler, self.runner, self._lock = scheduler, runner, lock
        self._in_flight: deque[tuple[Plan, RunningStep]] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def is_oldest_done(self) -> bool:
        return self._in_flight[0][1].done()

    def launch_next(self) -> bool:
        """Plan a step and launch it; false if there is nothing to compute."""
        with self._lock:
            plan = self.scheduler.plan()
        if plan is None:
            return False
        try:
            self._in_flight.append((plan, self.runner.launch(plan.input)))
        except BaseException as error:  # the plan is open: whatever ended its launch must end it too
            failed: Future[StepResult] = Future()
            is_ordinary = isinstance(error, Exception)
            failed.set_exception(error if is_ordinary else StoppedError("The step was interrupted."))
            self._in_flight.append((plan, failed))
            if not is_ordinary:
                raise
        return True

    def commit_oldest(self) -> None:
        """Wait for the oldest step and commit it. It stays here while it is waited for, so that ctrl-c loses nothing."""
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
