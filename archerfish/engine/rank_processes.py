"""The processes of an engine whose model is divided: this one, which is rank 0 and plans, and a child for each other
rank.

A child reads pickles from its standard input: a RankJob, then a StepInput for each step (None: use idle time). It
computes what rank 0 computes, in the same order, so that exchanges meet. It ends when its input ends, and so never
outlives its parent. On standard output it writes a pickle when it is ready to meet the others, and its error when it
fails. Adapters come as a SlotFill each, which a thread of its own takes in while steps go on; that a slot is filled it
says there too.

A rank that fails in a step leaves the others waiting or out of step. So the first failure ends all of them, and the
engine refuses further work.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from archerfish.background import signals_to
from archerfish.config import EngineConfig, HubConfig
from archerfish.engine.llm_loading import ModelFacts, make_runner, read_facts
from archerfish.errors import ArcherfishError, DeviceError, InvalidOptionError, StoppedError
from archerfish.kernels.adapters import LowRank
from archerfish.kernels.machine import cpu
from archerfish.kernels.ranks import Ranks
from archerfish.kernels.select import choose_backend, import_torch
from archerfish.runtime.runner import ModelRunner, OtherRanks, RunningStep
from archerfish.step import StepInput
from archerfish.types import Progress, no_progress

if TYPE_CHECKING:
    import subprocess  # imported where it is used: every engine imports this module

PACKAGE_PATH = str(Path(__file__).parents[2])
MAIN = "from archerfish.engine.rank_processes import main; main()"
READY, FILLED = "ready", "filled"
CONNECT_S = 60  # in which the ranks meet, when all of them are ready
STOP_S = 5.0  # in which a child ends after its input has ended
REPORT_S = 2.0  # in which the error of a child comes after others have noticed its end
AFTERWARDS = "Make a new engine; a service does so by itself, so that a request can be sent again."
logger = logging.getLogger("archerfish.engine")


@dataclass(frozen=True)
class RankJob:
    """What a child needs to know."""

    config: EngineConfig
    hub: HubConfig
    rank: int
    kind: str  # of torch.distributed's backend: nccl or gloo
    store: str  # a file by which ranks find each other

    def connect(self, facts: ModelFacts) -> Ranks:
        """The connection with the other ranks; waits until all of them are there."""
        import_torch("tensor_parallel_size or pipeline_parallel_size")
        from archerfish.kernels.torch.ranks import TorchRanks

        config, is_numpy = self.config, choose_backend(facts.device, facts.dtype).reads_stored
        return TorchRanks(
            self.rank,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            kind=self.kind,
            store=Path(self.store),
            device=facts.device,
            is_numpy=is_numpy,
        )


@dataclass(frozen=True)
class SlotFill:
    """An adapter for a slot, and the file with a pickle of its matrices."""

    slot: int
    path: str


def check_divided(config: EngineConfig) -> None:
    """Refuse options that a divided model does not have."""
    size = config.tensor_parallel_size
    for is_refused, name, why in (
        (config.speculation == "draft", "speculation=draft", "a draft model is not divided; ngram works"),
        (
            config.deterministic and size > 2,
            "deterministic",
            "the order of sums over more than two ranks depends on the batch",
        ),
        (config.device == "mps", "device=mps", "torch.distributed does not exchange its tensors"),
    ):
        if is_refused:
            raise InvalidOptionError(f"[engine] {name} and {config.num_ranks} ranks do not go together: {why}.")


def divided_config(config: EngineConfig, device: str) -> tuple[EngineConfig, str, list[str]]:
    """The options of each rank, the kind of exchange, and the cards of the ranks: with fewer cards than ranks, they
    share."""
    num = config.num_ranks
    if device != "cuda":
        share = config.num_threads or max(1, cpu().num_cores // num)
        return config.replace(device=device, num_threads=share, pin_threads=False), "gloo", []
    import torch

    stated, own = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.current_device()
    cards = stated.split(",") if stated else [str(i) for i in range(torch.cuda.device_count())]
    cards, each = cards[own:] + cards[:own], -(-num // len(cards))
    config = config.replace(device=device, gpu_memory_utilization=config.gpu_memory_utilization / each)
    return config, "nccl" if each == 1 else "gloo", [cards[rank % len(cards)] for rank in range(num)]


class RankProcesses(OtherRanks):
    """The children of an engine, and its connection with them, `ranks`."""

    def __init__(self, config: EngineConfig, hub: HubConfig, facts: ModelFacts) -> None:
        """config: from `divided_config`."""
        check_divided(config)
        self.config, kind, cards = divided_config(config, facts.device)
        self._error: BaseException | None = None
        self._is_closed = False
        self._lock, self._has_failed = threading.Lock(), threading.Event()
        self._sending, self._filled = threading.Lock(), SimpleQueue[str]()
        self._directory = tempfile.mkdtemp(prefix="archerfish-ranks-")
        self.ranks = Ranks()
        first = RankJob(self.config, hub, 0, kind, f"{self._directory}/store")
        self._children: list[subprocess.Popen[bytes]] = []
        self._ready: list[threading.Event] = []
        try:
            for rank in range(1, config.num_ranks):
                self._start(replace(first, rank=rank), cards[rank] if cards else None)
            for ready in self._ready:
                ready.wait()
            with self.guard():
                self.ranks = first.connect(facts)
        except BaseException:
            self.close()
            raise

    def _start(self, job: RankJob, card: str | None) -> None:
        import subprocess

        paths = os.pathsep.join(filter(None, (PACKAGE_PATH, os.environ.get("PYTHONPATH", ""))))
        variables = {**os.environ, "PYTHONPATH": paths} | ({} if card is None else {"CUDA_VISIBLE_DEVICES": card})
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            process_group=0,  # ctrl-c reaches the parent only
        )
        ready = threading.Event()
        self._children.append(child)
        self._ready.append(ready)
        threading.Thread(target=self._watch, args=(child, job.rank, ready), daemon=True).start()
        self._write(child, pickle.dumps(job))

    def _watch(self, child: subprocess.Popen[bytes], rank: int, ready: threading.Event) -> None:
        """Take in what a child reports, until it ends."""
        assert child.stdout is not None
        error: BaseException | None = None
        with suppress(EOFError, pickle.UnpicklingError):
            while error is None:
                found = pickle.load(child.stdout)
                if isinstance(found, BaseException):
                    error = found
                elif found == FILLED:
                    self._filled.put(found)
                ready.set()
        child.stdout.close()
        if not self._is_closed:
            unreported_error = DeviceError(
                f"Rank {rank} ended with {child.wait()}.", hint="What it has printed may say why."
            )
            self.fail(error or unreported_error, is_cause=True)
        ready.set()

    @contextmanager
    def launching(self, step: StepInput | None) -> Iterator[None]:
        """Ctrl-c waits: a step that was sent must be launched here too."""
        interrupts: list[int] = []
        with signals_to(lambda number, _: interrupts.append(number), signal.SIGINT), self.guard():
            self._send(step if step is None else for_others(step))
            yield
        if interrupts:
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def filling(self, slot: int, matrices: Mapping[str, LowRank]) -> Iterator[None]:
        with self.guard():
            path = Path(self._directory, f"adapter-{slot}")
            path.write_bytes(pickle.dumps(matrices, protocol=pickle.HIGHEST_PROTOCOL))
            self._send(SlotFill(slot, str(path)))
            try:
                yield
            finally:
                for _ in self._children:
                    self._filled.get()
            with self.guard():  # one may have failed meanwhile
                path.unlink()

    def _send(self, message: Any) -> None:
        """To every child; all of them get messages in one order."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            for child in self._children:
                self._write(child, data)

    def _write(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        assert child.stdin is not None
        with suppress(OSError):  # it has ended, which `_watch` reports
            child.stdin.write(data)
            child.stdin.flush()

    @property
    def problem(self) -> str:  # type: ignore[override]
        return "" if self._error is None else f"the processes that compute a model have ended: {self._error}"

    @contextmanager
    def guard(self) -> Iterator[None]:
        if self._error is not None:
            raise StoppedError(f"The processes that compute this model have ended: {self._error}", hint=AFTERWARDS)
        try:
            yield
        except StoppedError:  # from a guard within
            raise
        except Exception as error:
            self.fail(error)
            if self._error is error:
                raise
            message = f"Another rank failed, and with it the engine: {self._error}"
            raise StoppedError(message, hint=AFTERWARDS) from error

    def fail(self, error: BaseException, *, is_cause: bool = False) -> None:
        """End all ranks. is_cause: a child reports it; else a child may have caused it, and its report is on its
        way."""
        if not is_cause:
            self._has_failed.wait(REPORT_S)
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._has_failed.set()
        for _ in self._children:
            self._filled.put("")  # nobody waits any more
        logger.error("A rank failed, and the others are ended: %s", error)
        for child in self._children:
            child.kill()
        self.ranks.abort()
        shutil.rmtree(self._directory, ignore_errors=True)  # the process may end without `close`

    def close(self) -> None:
        if self._is_closed:
            return
        import subprocess

        self._is_closed = True
        for child in self._children:
            assert child.stdin is not None
            with suppress(OSError):
                child.stdin.close()
        for child in self._children:
            try:
                child.wait(STOP_S if self._error is None else 0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def start_runner(
    facts: ModelFacts, config: EngineConfig, hub: HubConfig, executor: Executor | None, progress: Progress
) -> tuple[ModelRunner[Any], ModelFacts, EngineConfig]:
    """As `make_runner`, with the processes that compute together with this one, if any; and the options of each of
    them."""
    if config.num_ranks == 1:
        return *make_runner(facts, config, executor, progress=progress), config
    others = RankProcesses(config, hub, facts)
    try:
        with others.guard():
            runner, facts = make_runner(facts, others.config, executor, progress=progress, ranks=others.ranks)
    except BaseException:
        others.close()
        raise
    runner.others = others
    return runner, facts, others.config


def for_others(step: StepInput) -> StepInput:
    """A step without functions of the user's: rank 0 runs these, and its tokens count on all ranks.

    Rows that have some are marked as rows with a grammar are: the tokens of both are chosen from logits.
    """
    if not any(entry.params.logits_processors for entry in step.entries):
        return step
    entries = [
        replace(entry, params=replace(entry.params, logits_processors=()), has_grammar=True)
        if entry.params.logits_processors
        else entry
        for entry in step.entries
    ]
    return replace(step, entries=entries)


# A child


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox, reports = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes to the log
    try:
        job: RankJob = pickle.load(inbox)
        facts = read_facts(job.config, job.hub, no_progress, rank=job.rank)
        import_torch("A rank")
        report(reports, READY)
        signal.alarm(CONNECT_S)  # ends this process if its parent has gone: gloo waits with the interpreter's lock
        ranks = job.connect(facts)
        signal.alarm(0)
        runner, _ = make_runner(facts, job.config, ranks=ranks)
        follow(runner, inbox, reports)
        shutil.rmtree(Path(job.store).parent, ignore_errors=True)  # the parent may have been killed
    except BaseException as error:
        fail(reports, error)
    os._exit(0)


def fail(reports: IO[bytes], error: BaseException) -> None:
    logger.exception("A rank failed.")
    is_ours = isinstance(error, ArcherfishError)
    report(reports, error if is_ours else DeviceError(f"{type(error).__name__}: {error}", hint=""))
    os._exit(1)  # threads may wait for an exchange


def report(reports: IO[bytes], what: Any) -> None:
    with suppress(OSError):  # the parent has ended
        pickle.dump(what, reports)
        reports.flush()


def fill_slot(runner: ModelRunner[Any], fill: SlotFill, reports: IO[bytes]) -> None:
    try:
        runner.fill_slot(fill.slot, pickle.loads(Path(fill.path).read_bytes()))
        report(reports, FILLED)
    except BaseException as error:
        fail(reports, error)


def follow(runner: ModelRunner[Any], inbox: IO[bytes], reports: IO[bytes]) -> None:
    """Compute the steps that come, until the input ends. One is planned ahead, as in rank 0."""
    before: RunningStep | None = None
    filling = ThreadPoolExecutor(1, thread_name_prefix="archerfish-adapters")
    while True:
        try:
            step: StepInput | SlotFill | None = pickle.load(inbox)
        except EOFError:
            return
        if isinstance(step, SlotFill):
            filling.submit(fill_slot, runner, step, reports)
            continue
        running = runner.launch(step) if step is not None else None
        if step is None:
            runner.use_idle_time()
        if before is not None:
            before.result()
        before = running
