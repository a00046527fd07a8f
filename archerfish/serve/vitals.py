"""Signs of life of an engine process: what it tells its supervisor, and how the two of them judge that it hangs.

The loop of the process writes a line every BEAT_S to its standard output, so that a silence means that the loop stands still.
What the line says comes from the compute thread: a complaint, once there is work and no job has ended for too long.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from archerfish.serve.compute import ComputeThread

BEAT_S = 1.0
MOST_GAP_S = 2 * BEAT_S  # of two looks; who looks later than that has slept himself
YOUNG_JOBS, YOUNG_FACTOR = 64, 5  # a model's first jobs may compile kernels
USUAL_FACTOR = 4  # a job may take so many times as long as the longest before it


class Stall:
    """For how long nothing has got on, for one who looks about every BEAT_S.

    Only time counts in which one looked: who has been stopped together with what he watches must not blame it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at: float | None = None
        self._progress = 0

    def look(self, now: float, progress: int, *, has_work: bool = True) -> float:
        """progress: any number that changes with it."""
        gap = 0.0 if self._looked_at is None else min(now - self._looked_at, MOST_GAP_S)
        is_stalled = has_work and progress == self._progress
        self.seconds = self.seconds + gap if is_stalled else 0.0
        self._looked_at, self._progress = now, progress
        return self.seconds


class ComputeWatch:
    """Whether the compute thread gets on; hang_s: how long a job may take, if its model has not shown that it needs more."""

    def __init__(self, compute: ComputeThread, hang_s: float) -> None:
        self._compute, self._hang_s = compute, hang_s
        self._stall = Stall()

    def look(self, now: float, *, has_work: bool, is_loading: bool, num_moves: int = 0) -> str:
        """What there is to complain of; empty: nothing. has_work: of the models, whether or not it has become a job.

        num_moves: how often models have got on, which they do without jobs where a device computes.
        """
        has_work = has_work or self._compute.has_work
        seconds = self._stall.look(now, self._compute.num_done + num_moves, has_work=has_work)
        return self.complaint(seconds, is_loading=is_loading)

    def complaint(self, seconds: float, *, is_loading: bool = False) -> str:
        if seconds <= self.patience_s(is_loading=is_loading):
            return ""
        lane = self._compute.running_lane
        who = "There is work, but no job" if lane is None else f"A job of {lane.name} runs and none"
        return f"{who} has ended for {seconds:.0f} s."

    def patience_s(self, *, is_loading: bool = False) -> float:
        lane = self._compute.running_lane
        is_young = is_loading or (lane is not None and lane.num_done < YOUNG_JOBS)
        longest_s = 0.0 if lane is None else lane.longest_s
        return max(self._hang_s * (YOUNG_FACTOR if is_young else 1), USUAL_FACTOR * longest_s)


class Heart:
    """Writes beats into a pipe that nobody may read for a while, without waiting."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe.fileno()
        self._keeps = pipe  # open
        os.set_blocking(self._pipe, False)

    def beat(self, complaint: str) -> None:
        with contextlib.suppress(OSError):  # full, so that enough is there to be read; or nobody is left to read it
            os.write(self._pipe, msgspec.json.encode({"complaint": complaint}) + b"\n")


class Pulse:
    """The beats of a process as its supervisor hears them. silence_s: how long there may be none."""

    def __init__(self, silence_s: float, clock: Callable[[], float]) -> None:
        self._silence_s, self._clock = silence_s, clock
        self._stall = Stall()
        self._num_beats = 0
        self._rest = b""

    def hear(self, data: bytes) -> str:
        """Bytes that have come since the last call, or none; answers why the process hangs, if it does."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._num_beats += len(lines)
        silent_s = self._stall.look(self._clock(), self._num_beats)
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # whatever it is, it is a sign of life
                complaint = msgspec.json.decode(line, type=dict[str, str]).get("complaint")
                if complaint:
                    return complaint
        return f"Its loop has not moved for {silent_s:.0f} s." if silent_s > self._silence_s else ""
