"""A process with a paced engine: alone with a sink for its tokens, or behind a ROUTER socket as an engine process has it.

Reads lines of JSON from standard input: first a Setup, then a Task for each run; answers each with one line. It ends when
standard input does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from archerfish.bench.paced_engine import FIRST_WORD, NAME, NO_WAIT, Pace, PacedRunner, figures_of, make_engine, save_model
from archerfish.engine.llm_engine import LLMEngine
from archerfish.params import SamplingParams

COMMAND = (sys.executable, "-m", "archerfish.bench.paced_process")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """address: where to serve; "" for an engine alone."""

    address: str = ""
    front_end_pass: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. begin: forget the steps so far and go on at another pace; report: tell of them; run: do it all, alone."""

    kind: str
    pace: Pace = NO_WAIT
    num_streams: int = 0
    num_tokens: int = 0
    num_prompt: int = 32


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """figures: of the steps that all streams took part in; ends: when each step ended, on the machine's monotonic clock."""

    address: str = ""
    figures: dict[str, float] = {}
    ends: dict[int, float] = {}


def lines() -> Iterator[bytes]:
    rest = b""
    while piece := os.read(0, 1 << 16):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


def report_of(runner: PacedRunner, num_streams: int) -> Report:
    steps = list(runner.steps)
    return Report(figures=figures_of(steps, num_streams), ends={step.number: step.ended_s for step in steps})


def run_alone(engine: LLMEngine, runner: PacedRunner, task: Task) -> None:
    """All streams to their end, into a sink in this process."""
    params = SamplingParams(max_tokens=task.num_tokens, ignore_eos=True, temperature=0.0)
    for number in range(task.num_streams):
        prompt = [FIRST_WORD + number, *range(FIRST_WORD, FIRST_WORD + task.num_prompt - 1)]
        engine.submit(engine.prepare_request(prompt, params, listener=lambda delta: None, wants_text=False))
    while engine.has_work:
        engine.step()


def serve_tasks(engine: LLMEngine, runner: PacedRunner, told: BinaryIO, given: Iterator[bytes]) -> None:
    for line in given:
        task = msgspec.json.decode(line, type=Task)
        if task.kind in ("begin", "run"):
            runner.pace = task.pace
            runner.steps.clear()
        if task.kind == "run":
            run_alone(engine, runner, task)
        tell(told, Report() if task.kind == "begin" else report_of(runner, task.num_streams))


def tell(told: BinaryIO, report: Report) -> None:
    told.write(msgspec.json.encode(report) + b"\n")
    told.flush()


def serve(setup: Setup, model: Path, told: BinaryIO, given: Iterator[bytes]) -> None:
    """The loop, the socket and the gate of an engine process, around a paced engine."""
    from archerfish.serve.compute import Lane
    from archerfish.serve.host import EngineHost
    from archerfish.serve.host_config import HostConfig
    from archerfish.serve.hosted_llm import HostedLLM
    from archerfish.serve.models import Hosted, ModelEntry

    host = EngineHost(HostConfig(address=setup.address, front_end_pass=setup.front_end_pass))
    made: list[tuple[LLMEngine, PacedRunner]] = []

    def load(lane: Lane) -> Hosted:
        made.append(make_engine(model, lane, text_thread=host.writer))
        return HostedLLM(made[0][0], lane, host, host.figures, host.llm_controller(made[0][0]))

    host.models.add(ModelEntry(NAME, "generation", load))
    tell(told, Report(address=host.open()))

    def work() -> None:
        serve_tasks(*made[0], told, given)
        host.stop(0)

    threading.Thread(target=work, name="archerfish-tasks", daemon=True).start()
    host.run()


def main() -> int:
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed
    given = lines()
    setup = msgspec.json.decode(next(given), type=Setup)
    with tempfile.TemporaryDirectory(prefix="archerfish-paced-") as directory:
        model = save_model(Path(directory))
        if setup.address:
            serve(setup, model, told, given)
        else:
            engine, runner = make_engine(model)
            tell(told, Report())
            with engine:
                serve_tasks(engine, runner, told, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
