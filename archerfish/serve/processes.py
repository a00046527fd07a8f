"""The processes of a service. The main process starts the engine process and the front ends and keeps them running.

A child process reads its configuration from standard input, as one line of JSON, and ends when that input ends. It
therefore never outlives the main process. On standard output it writes one line when it serves, or when it cannot;
after that, an engine process writes a heartbeat every second. Each child has its own process group, so that Ctrl+C
reaches the main process only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import FrameType
from typing import IO, Any, BinaryIO, Literal, TypeVar

import msgspec

from archerfish.background import is_importing, signals_to
from archerfish.config import EmbedConfig, EngineConfig
from archerfish.errors import InvalidOptionError, MachineError, StoppedError
from archerfish.serve.wire import Kind

logger = logging.getLogger("archerfish.serve")
T = TypeVar("T")
GRACE_S = 30.0  # running requests may take this long after SIGTERM
BEAT_S = 1.0  # time between two heartbeats
MAX_GAP_S = 2 * BEAT_S
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 15.0
STEADY_S = 60.0  # a process that lived this long did not die of its start
KILL_AFTER_S = 5.0  # added to the grace time of a process
LAST_S = 1.0  # time for a killed process to end, and for a front end to send its last errors


# Configuration


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model to serve. The options are those of EngineConfig, or of EmbedConfig for embeddings and cross-encoders.

    Requests that name no model mean the first one of their kind. served_names: public names; empty: that of the model.
    """

    kind: Kind
    options: dict[str, Any] = {}
    loads: Literal["start", "idle", "demand"] = "start"
    aliases: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        usual = EngineConfig.model if self.kind == "generation" else EmbedConfig.model
        return str(self.options.get("model", usual))

    @property
    def num_ranks(self) -> int:
        """Processes that compute it together."""
        return EngineConfig(**self.options).num_ranks if self.kind == "generation" else 1


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an engine process.

    front_end_pass: front ends send it as credentials; with it they may name tenants, read statistics and change
    options.
    secret_key: the CURVE key of the process, for TCP. client_keys: the public keys that may connect, or empty.
    """

    address: str = ""  # where the front ends connect
    open_address: str = ""  # where other programs connect; empty: nowhere
    models: tuple[ModelSpec, ...] = ()
    hub: dict[str, Any] = {}
    front_end_pass: str = ""
    secret_key: str = ""
    client_keys: tuple[str, ...] = ()
    api_keys_file: str = ""  # API keys and limits of tenants
    adapters_file: str = ""  # where changes of adapters are kept for a process that is started again; empty: nowhere
    routing_secret: str = (
        ""  # of the replicas of a service, whose front ends count the limits of tenants; "": the only one
    )
    admission: dict[str, Any] = {}  # max_wait_s, max_prompt_tokens and max_output_tokens of OverloadController
    latency_budget_ms: float = 50.0  # duration of one job of embeddings
    max_gap_ms: float = 0.0  # duration of a step with prompts; 0: by device
    max_queue_texts: int = 8192
    max_message_bytes: int = 64 << 20
    memory_gib: float = 0.0  # limit for all loaded models together; 0: no limit
    name: str = "engine"  # in the log
    log_format: str = "pretty"  # as [serve] log_format
    grace_s: float = GRACE_S
    hang_s: float = 120.0  # a longer job counts as hung, unless its model is new or has needed a quarter of that before
    silence_s: float = 60.0  # a process without a heartbeat for so long counts as hung

    def __post_init__(self) -> None:
        """Refuse addresses that other machines can reach without encryption."""
        if self.client_keys and not self.secret_key:
            raise InvalidOptionError("There are CURVE keys of clients, but none of the ZMQ server.")
        for address in filter(None, (self.address, self.open_address)):
            scheme, _, rest = address.partition("://")
            if scheme not in ("ipc", "tcp", "inproc") or not rest:
                raise InvalidOptionError(
                    f"{address!r} is no address.", hint="Write ipc:///a/path or tcp://127.0.0.1:5555."
                )
            if scheme == "tcp" and not self.secret_key and not is_loopback(rest.rpartition(":")[0]):
                hint = "Give the ZMQ server keys ([serve] zmq_key_file), or listen on tcp://127.0.0.1."
                raise InvalidOptionError(f"Other machines can reach {address}, but there are no CURVE keys.", hint=hint)


class FrontConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a front end. `serve` has the values of ServeConfig.

    addresses: of the engine process, or of all replicas; none on a cluster, where a front end learns of them and
    connects with `own_keys`, a public and a secret CURVE key.
    """

    addresses: tuple[str, ...] = ()
    own_keys: tuple[str, str] = ("", "")
    credentials: str
    routing_secret: str = ""
    serve: dict[str, Any] = {}
    retry_after_s: float = 1.0
    listener: int = -1  # file descriptor of the socket from which it accepts connections


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# Children of the main process


class ProcessStartError(MachineError):
    """A process ended before it served."""

    code = "engine_start_failed"


class Stall:
    """Measures for how long something has made no progress.

    A gap between two calls counts as MAX_GAP_S at most: if the watcher itself was paused, the watched process probably
    was too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._checked_at: float | None = None
        self._progress = 0

    def check(self, now: float, progress: int, *, has_work: bool = True) -> float:
        """Return the seconds without progress. `progress` is any number that changes with it."""
        gap = 0.0 if self._checked_at is None else min(now - self._checked_at, MAX_GAP_S)
        is_stalled = has_work and progress == self._progress
        self.seconds = self.seconds + gap if is_stalled else 0.0
        self._checked_at, self._progress = now, progress
        return self.seconds


class KeptProcess:
    """Starts a child process, starts it again when it dies or hangs, and stops it.

    `config` is called for every start, after the child was launched. With `silence_s`, a child without a heartbeat for
    so long is killed. `force_signal` ends the child at once. cores: on which it runs; (): as this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        config: Callable[[], msgspec.Struct],
        *,
        grace_s: float = GRACE_S,
        silence_s: float = 0.0,
        force_signal: int = signal.SIGKILL,
        pass_fds: Sequence[int] = (),
        cores: Collection[int] = (),
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.is_serving = False
        self.num_starts = self.num_failed_starts = 0
        self.start_s = 0.0  # duration of the last start
        self._command = command
        self._config = config
        self._pass_fds = pass_fds
        self._cores = cores
        self._environment = {**os.environ, **environment} if environment else None
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._force_signal = force_signal
        self._clock = clock
        self._first_report: Future[dict[str, str]] = Future()
        self._is_stopping = threading.Event()
        self._is_killed = self._is_replaced = False
        self._lock = threading.Lock()  # for the launch of a process and the decision to launch no more
        self._thread = threading.Thread(target=self._keep, name=f"archerfish-{name.replace(' ', '-')}", daemon=True)

    @property
    def pid(self) -> int:
        """The process id, or 0 while no process runs."""
        return 0 if self.process is None or self.process.returncode is not None else self.process.pid

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> dict[str, str]:
        """Wait until the first process serves and return its report; an error says why it does not serve."""
        return self._first_report.result()

    def _keep(self) -> None:
        num_short_lives = 0
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # of this thread, which the child inherits
        while not self.is_ending:
            started_at = self._clock()
            try:
                self._run()
            except Exception as error:
                self.num_failed_starts += 1
                if not self._first_report.done():
                    self._first_report.set_exception(error)
                    return
                if not self.is_ending:
                    logger.error("The %s could not be started: %s", self.name, error)
            is_steady, self._is_replaced = self._is_replaced or self._clock() - started_at > STEADY_S, False
            num_short_lives = 0 if is_steady else num_short_lives + 1
            self._is_stopping.wait(0.0 if self.is_ending else backoff_s(num_short_lives))
        if not self._first_report.done():
            self._first_report.set_exception(StoppedError(f"The {self.name} was stopped before it served."))

    @property
    def is_ending(self) -> bool:
        return self._is_killed or self._is_stopping.is_set()

    def _run(self) -> None:
        """Run one process from its start to its end."""
        started_at = time.monotonic()
        with self._lock:
            if self.is_ending:
                return
            process = self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=self._pass_fds,
                process_group=0,
                env=self._environment,
            )
        assert process.stdin is not None and process.stdout is not None
        try:
            report = self._configure(process, process.stdin, process.stdout)
            self.start_s = time.monotonic() - started_at
            self.num_starts += 1
            self.is_serving = True
            if not self._first_report.done():
                self._first_report.set_result(report)
            self._watch(process, process.stdout)
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            if self.is_serving and not self.is_ending and not self._is_replaced:
                logger.error("The %s has died (%s) and is started again.", self.name, status_text(code))
            self.is_serving = False

    def _configure(self, process: subprocess.Popen[bytes], stdin: IO[bytes], stdout: IO[bytes]) -> dict[str, str]:
        """Send the configuration and wait until the process serves."""
        with contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(self._config()) + b"\n")
        line = stdout.readline()
        report = msgspec.json.decode(line, type=dict[str, str]) if line.startswith(b"{") else {}
        if "address" not in report:
            message = f"The {self.name} ended while it started, with {status_text(process.wait())}; its log says why."
            raise ProcessStartError(report.get("error", message), hint=report.get("hint", ""))
        return report

    def _watch(self, process: subprocess.Popen[bytes], stdout: IO[bytes]) -> None:
        """Return when the process has ended, or was killed because it hangs. This must work without a free file
        descriptor."""
        stall, num_bytes = Stall(), 0
        timeout_ms = BEAT_S * 1000 if self._silence_s else None
        poller = select.poll()
        poller.register(stdout, select.POLLIN)
        while True:
            data = os.read(stdout.fileno(), 1 << 16) if poller.poll(timeout_ms) else None
            if data == b"":
                return
            num_bytes += len(data or b"")
            silent_s = stall.check(self._clock(), num_bytes)
            if self._silence_s and silent_s > self._silence_s and not self.is_ending:
                logger.error("The %s sent no heartbeat for %.0f s and is killed.", self.name, silent_s)
                process.kill()
                return

    def terminate(self) -> None:
        """Ask the process to finish its work and end, without waiting for it; no other is started."""
        with self._lock:
            if self.process is not None and not self._is_stopping.is_set():
                self.process.terminate()  # once: a second signal may hit a process that handles none any more
            self._is_stopping.set()

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(self._grace_s + KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            logger.error("The %s did not end within its grace time and is killed.", self.name)
            process.kill()

    def replace(self) -> bool:
        """Let the process finish its work and start another. True once that one serves; false if it does not, or at the
        end."""
        with self._lock:
            process, num_before = self.process, self.num_starts + self.num_failed_starts
            if process is None or self.is_ending:
                return False
            self._is_replaced = True
            process.terminate()
        self._wait_for_end(process)
        while not self.is_ending and self.num_starts + self.num_failed_starts == num_before:
            self._is_stopping.wait(0.05)
        return self.is_serving

    def stop(self) -> None:
        """Let the process finish its work and wait until it has ended. It is killed after its grace time."""
        self.terminate()
        if self.process is not None:
            self._wait_for_end(self.process)
        if self._thread.is_alive():
            self._thread.join()

    def force(self) -> None:
        """Send the signal that ends the process at once. A signal handler may call this, as it takes no lock."""
        self._is_killed = True
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.send_signal(self._force_signal if self.is_serving else signal.SIGKILL)

    def reap(self, timeout_s: float) -> None:
        """Wait until the process has ended and kill it after `timeout_s`. A signal handler may call this too."""
        if self.process is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait(LAST_S)


def engine_process(
    config: HostConfig, command: Sequence[str] = (sys.executable, "-m", "archerfish.serve.host"), **options: Any
) -> KeptProcess:
    """options: others of KeptProcess."""
    name = "engine process" if config.name == HostConfig.name else f"engine process {config.name}"
    return KeptProcess(name, command, lambda: config, grace_s=config.grace_s, silence_s=config.silence_s, **options)


def front_process(
    config: Callable[[], msgspec.Struct],
    listener: int,
    command: Sequence[str] = (sys.executable, "-m", "archerfish.serve.front"),
    *,
    grace_s: float = GRACE_S,
) -> KeptProcess:
    """A front end that accepts connections from the socket with the file descriptor `listener`."""
    return KeptProcess("front end", command, config, grace_s=grace_s, force_signal=signal.SIGINT, pass_fds=(listener,))


def stop_all(processes: Sequence[KeptProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.stop()


def kill_all(processes: Sequence[KeptProcess]) -> None:
    """End processes at once. Front ends get a moment to send errors to their clients."""
    for process in processes:
        process.force()
    end = time.monotonic() + 2 * LAST_S
    for process in processes:
        process.reap(max(0.0, end - time.monotonic()))


def backoff_s(num_short_lives: int) -> float:
    """Seconds to wait before the next start, after so many processes in a row that ended soon."""
    return 0.0 if num_short_lives < 2 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_short_lives - 2, 10))


def status_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"


# Signals of the main process


def stop_on_signals(kill: Callable[[], None]) -> AbstractContextManager[None]:
    """Make the first SIGINT or SIGTERM raise an exception, so that the service stops in order.

    A SIGINT after that, or any of the two while a module is imported, calls `kill`, which must take no locks, and
    exits at once.
    """
    is_stopping = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        was_stopping, is_stopping = is_stopping, True
        if not was_stopping and not is_importing(frame):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if not was_stopping or number == signal.SIGINT:
            with contextlib.suppress(Exception):
                kill()
            os._exit(128 + number)

    return signals_to(handle, signal.SIGINT, signal.SIGTERM)


# For the child itself


def open_report_pipe() -> BinaryIO:
    """Return the pipe to the main process. Everything else that is printed goes to standard error, the log."""
    pipe = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    return pipe


def send_report(pipe: BinaryIO, report: dict[str, str]) -> None:
    pipe.write(msgspec.json.encode(report) + b"\n")


def read_config(kind: type[T]) -> T:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(1)  # the main process has ended
    return msgspec.json.decode(line, type=kind)


def watch_parent(on_end: Callable[[], Any], on_line: Callable[[bytes], Any] | None = None) -> None:
    """Call `on_end` in a thread when the main process has ended, and `on_line` with each line that it sends before."""

    def watch() -> None:
        for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115  # a buffer's lock could not be taken at the end
            if on_line is not None:
                on_line(line)
        on_end()

    threading.Thread(target=watch, name="archerfish-parent", daemon=True).start()
