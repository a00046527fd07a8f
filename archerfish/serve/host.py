"""The engine process: all models of a device behind a ROUTER socket.

One loop receives requests, hands them to the models, lets the models make progress, and sends their answers. It waits for
events only. Everything is computed in one other thread (`compute`); text is read and written in further threads.
`engine_process` is the process around it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from archerfish.config import HubConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import ArcherfishError, InvalidInputError, MachineError, StoppedError
from archerfish.observe.collector import MetricsCollector
from archerfish.sched.policy import FairShare
from archerfish.serve import wire
from archerfish.serve.client import open_socket, set_keys
from archerfish.serve.compute import ComputeThread, Waker, WakingExecutor
from archerfish.serve.health import HangWatch, HealthCheck
from archerfish.serve.host_config import Callers, HostConfig, check_address, start_authenticator
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.limits import RateLimits
from archerfish.serve.metrics import FrontEndMetrics, gauges, metric_values
from archerfish.serve.models import GENERATION, SCORES, VECTORS, ModelTable, make_entry
from archerfish.serve.overload import AdmissionLimits, OverloadController
from archerfish.serve.pending_request import PendingRequest
from archerfish.serve.processes import BEAT_S
from archerfish.serve.wire import (
    Bundle,
    Cancel,
    Charge,
    Chunk,
    Configure,
    EmbedRequest,
    ExplainRequest,
    Failed,
    GenerationRequest,
    Message,
    Ping,
    Query,
    Report,
    ScoreRequest,
)

logger = logging.getLogger("archerfish.serve")
MESSAGE = int(zmq.POLLIN)
MAX_RECEIVED = 64  # messages of one round, so that a flood delays the models by a few milliseconds only
IDLE_POLL_MS = 1000
MIN_RETRY_AFTER_S = 1.0


class Listener:
    """The ROUTER sockets of an engine process: one for front ends and, if configured, one for other programs.

    A client is identified by the number of its socket and its ZMQ identity.
    """

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._authenticator: ThreadAuthenticator | None = None
        self._clients: dict[int, bytes] = {}  # by the file descriptor of their connection
        self._disconnected: list[bytes] = []

    def open(self, poller: zmq.Poller) -> list[str]:
        """Listen on all configured addresses and return them, with their real ports."""
        if self._config.client_keys:
            self._authenticator = start_authenticator(self._config.client_keys)
        return [self._open(address, poller) for address in (self._config.address, self._config.open_address) if address]

    def _open(self, address: str, poller: zmq.Poller) -> str:
        opened = open_socket(zmq.ROUTER)
        opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
        opened.setsockopt(zmq.MAXMSGSIZE, self._config.max_message_bytes)
        if self._config.secret_key and address.startswith("tcp:"):
            opened.setsockopt(zmq.CURVE_SERVER, 1)
            set_keys(opened, CURVE_PUBLICKEY=self._config.public_key, CURVE_SECRETKEY=self._config.secret_key)
            if self._config.client_keys:
                opened.setsockopt(zmq.ZAP_DOMAIN, b"archerfish")
        self._sockets.append(opened)
        self._monitors.append(opened.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        try:
            opened.bind(address)
        except zmq.ZMQError as error:
            self.close(0)
            hint = "Choose another address, or stop the process that has this one."
            raise MachineError(f"Cannot listen on {address}: {error}.", hint=hint) from error
        poller.register(opened, zmq.POLLIN)
        poller.register(self._monitors[-1], zmq.POLLIN)
        endpoint = opened.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the client and the payload of all messages, at most MAX_RECEIVED of a socket."""
        for number, socket in enumerate(self._sockets):
            if not has_message(socket):
                continue
            for _ in range(MAX_RECEIVED):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                client = bytes([number]) + frames[0].bytes
                self._note_connection(client, frames[-1])
                is_whole = len(frames) == 3 and not frames[1].bytes
                yield client, frames[-1].bytes if is_whole else b""

    def _note_connection(self, client: bytes, frame: zmq.Frame) -> None:
        try:
            connection = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # inproc
            return
        if self._clients.get(connection) != client:
            self._read_events()  # the descriptor may have belonged to a client whose end was not read yet
            self._clients[connection] = client

    def take_disconnected(self) -> list[bytes]:
        """The clients whose connections have broken since the last call."""
        self._read_events()
        found, self._disconnected = self._disconnected, []
        return found

    def _read_events(self) -> None:
        for monitor in self._monitors:
            while has_message(monitor):
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                client = self._clients.pop(int(event["value"]), None)
                if client is not None:
                    self._disconnected.append(client)

    def send(self, client: bytes, payload: bytes) -> bool:
        """Return False if the client is gone, or reads so slowly that its queue is full."""
        try:
            self._sockets[client[0]].send_multipart([client[1:], b"", payload], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        for socket, monitor in zip(self._sockets, self._monitors, strict=True):
            socket.disable_monitor()
            monitor.close(0)
            socket.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._sockets, self._monitors, self._authenticator = [], [], None


class EngineHost:
    """Serves models at an address until it is stopped. As a context manager, it runs in a thread of its own."""

    def __init__(self, config: HostConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        check_address(config)
        self.config = config
        self.address, self.open_address = config.address, config.open_address
        self.clock = clock
        self.figures, self.front_end_metrics = MetricsCollector(), FrontEndMetrics(clock)
        self.waker = Waker()
        self.compute = ComputeThread(self.waker.wake, clock)
        self.reader: Executor = WakingExecutor("read", 2, self.waker)
        self.compiler: Executor = WakingExecutor("grammars", 2, self.waker)
        self.writer: Executor = WakingExecutor("write", 1, self.waker)
        self.models = ModelTable(
            self.compute, self, memory_bytes=int(config.memory_gib * (1 << 30)), clock=clock, live=self.pending_requests
        )
        self.watch = HangWatch(self.compute, config.hang_s)
        self.health = HealthCheck(self.models, self.compute, self.watch, self, clock)
        self.on_beat: Callable[[], None] = lambda: None  # called every BEAT_S while the process works
        self.on_hang: Callable[[], None] = lambda: None  # called instead while it hangs
        self.callers = Callers(config)
        self.rates, self.limits = RateLimits(clock), AdmissionLimits(**config.admission)
        self.num_lost_clients = 0
        self._listener = Listener(config)
        self._poller = zmq.Poller()
        self._is_open = False
        self._posted: deque[Callable[[], None]] = deque()
        self._outbox: deque[tuple[PendingRequest, Message]] = deque()
        self._pending: dict[bytes, dict[str, PendingRequest]] = {}  # by client and request_id
        self._next_beat = float("-inf")
        self._num_moves = 0  # rounds in which a model made progress
        self._stops_at: float | None = None  # while stopping: when running requests are given up
        self._thread: threading.Thread | None = None

    # Models

    def load_models(self) -> None:
        """Make an entry for every model of the configuration and load those that are loaded at the start."""
        hub = HubConfig(**self.config.hub)
        for spec in self.config.models:
            self.models.add(make_entry(
                spec, hub, self, self.figures, self.writer, latency_s=self.config.latency_budget_ms / 1000,
                llm_controller=self.llm_controller, encoder_controller=self.encoder_controller,
            ))  # fmt: skip

    def llm_controller(self, engine: LLMEngine) -> OverloadController:
        """The admission of requests to a generation model."""
        self._set_weights(engine)
        is_fair = isinstance(engine.scheduler.policy, FairShare)
        return OverloadController(
            rates=self.rates, limits=replace(self.limits, max_queued=engine.config.max_queue_size),
            max_running=engine.config.max_num_seqs, max_tokens=engine.facts.max_len,
            order="fair-share" if is_fair else "arrival", clock=self.clock,
        )  # fmt: skip

    def _set_weights(self, engine: LLMEngine) -> None:
        """Give a fair-share scheduler the current weights of the tenants."""
        policy = engine.scheduler.policy
        if isinstance(policy, FairShare):
            policy.set_weights({tenant.name: tenant.weight for tenant in self.callers.tenants.all()})

    def encoder_controller(self) -> OverloadController:
        """The admission of texts to an embedding model or a cross-encoder."""
        limits = AdmissionLimits(max_queued=self.config.max_queue_texts, max_wait_s=self.limits.max_wait_s)
        return OverloadController(rates=self.rates, limits=limits, order="round-robin", clock=self.clock)

    def pending_requests(self) -> Iterator[PendingRequest]:
        return (pending for requests in self._pending.values() for pending in requests.values())

    # For models, in any thread

    def answer(self, pending: PendingRequest, message: Message) -> None:
        self._outbox.append((pending, message))

    def fail(self, pending: PendingRequest, error: BaseException) -> None:
        if not isinstance(error, ArcherfishError):
            logger.error("A request failed.", exc_info=error)
        wait_s: float | None = getattr(error, "retry_after_s", None)
        if getattr(error, "status", 500) in (429, 503):
            if wait_s is None and pending.retry_after_s is not None:
                wait_s = pending.retry_after_s()
            wait_s = max(MIN_RETRY_AFTER_S, wait_s or 0.0)
        self.answer(pending, Failed.of(pending.message.request_id, error, wait_s))

    def post(self, work: Callable[[], None]) -> None:
        self._posted.append(work)
        self.waker.wake()

    # The loop

    def open(self) -> str:
        """Listen; return the address for front ends, with its real port."""
        self._is_open = True
        self._poller.register(self.waker.fileno(), zmq.POLLIN)
        self.address, *others = self._listener.open(self._poller)
        self.open_address = others[0] if others else ""
        return self.address

    def run(self) -> None:
        """Serve until `stop`; running requests are finished first."""
        if not self._is_open:
            self.open()
        timeout_ms = 0
        try:
            while not self._is_done():
                self._poller.poll(timeout_ms)
                timeout_ms = 0 if self._round() else self._pause_ms()
        finally:
            self._close()

    def _round(self) -> bool:
        """Do everything that can be done now; return whether there may be more."""
        self.waker.clear()
        num_received = 0
        for client, payload in self._listener.receive():
            self._receive(client, payload)
            num_received += 1
        while self._posted:
            self._posted.popleft()()
        has_moved = False
        for hosted in self.models:
            has_moved = hosted.advance() or has_moved
        self._num_moves += has_moved
        for client in self._listener.take_disconnected():
            self._drop_client(client)
        self._flush()
        self.figures.settle()
        self._beat()
        if not has_moved and not self._pending and self._stops_at is None:
            has_moved = self._use_idle_time()
        return has_moved or num_received >= MAX_RECEIVED

    def _beat(self) -> None:
        """Report every BEAT_S that the loop runs, unless the compute thread hangs."""
        now = self.clock()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        for hosted in self.models:
            if isinstance(hosted, HostedLLM):
                self._set_weights(hosted.engine)
        has_work = any(hosted.has_work for hosted in self.models)
        problem = self.watch.check(now, has_work=has_work, is_loading=self.models.is_loading, num_moves=self._num_moves)
        if problem:
            logger.error("The engine process hangs: %s", problem)
            self.on_hang()
        else:
            self.on_beat()

    def _pause_ms(self) -> int:
        left_s = IDLE_POLL_MS / 1000 if self._stops_at is None else self._stops_at - self.clock()
        return max(1, min(IDLE_POLL_MS, int(1000 * left_s) + 1))

    def _use_idle_time(self) -> bool:
        """Do some work in advance; return whether there is more of it."""
        self.models.keep_within_memory()
        self.models.load_next()
        return any(hosted.use_idle_time() for hosted in self.models)

    def _is_done(self) -> bool:
        if self._stops_at is None:
            return False
        return not self._pending or self.clock() >= self._stops_at

    def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests, finish the running ones, then end. Any thread and any signal handler may call this."""
        stops_at = self.clock() + (self.config.grace_s if grace_s is None else grace_s)
        self._stops_at = stops_at if self._stops_at is None else min(self._stops_at, stops_at)
        self.waker.wake()

    def _close(self) -> None:
        stopped = StoppedError("The engine was stopped before the answer was complete.", hint="Send the request again.")
        for pending in list(self.pending_requests()):
            self.fail(pending, stopped)
        self._flush()
        self.models.close()
        for threads in (self.reader, self.compiler, self.writer):
            threads.shutdown()
        self.compute.close()
        self._listener.close(1000)
        self.waker.close()

    def __enter__(self) -> Self:
        self.open()
        self._thread = threading.Thread(target=self.run, name="archerfish-host", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0)
        if self._thread is not None:
            self._thread.join()

    # Answers

    def _flush(self) -> None:
        """Send all answers. Those of one client that takes bundles go together."""
        bundles: defaultdict[bytes, list[Any]] = defaultdict(list)
        while self._outbox:
            pending, message = self._outbox.popleft()
            if pending.is_over:
                continue
            is_last = type(message) is not Chunk
            if is_last:
                self._end(pending)
            if pending.takes_bundles:
                bundles[pending.client].append(message)
            elif pending.on_end is None:
                self._send(pending.client, message)
            elif is_last:
                pending.on_end(message)
        for client, answers in bundles.items():
            self._send(client, answers[0] if len(answers) == 1 else Bundle(request_id="", answers=answers))

    def _send(self, client: bytes, message: Message) -> None:
        try:
            payload = wire.encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            payload = wire.encode(Failed.of(message.request_id, error))
            logger.error("An answer cannot be encoded.", exc_info=error)
        if not self._listener.send(client, payload):
            self._drop_client(client)

    def _end(self, pending: PendingRequest) -> None:
        """Forget a request and let its model free what it holds."""
        pending.is_over = True
        requests = self._pending.get(pending.client, {})
        if requests.get(pending.message.request_id) is pending:
            del requests[pending.message.request_id]
            if not requests:
                del self._pending[pending.client]
        if pending.release is not None:
            pending.release()

    def _drop_client(self, client: bytes) -> None:
        """Cancel all requests of a client that is gone."""
        requests = self._pending.get(client)
        if requests:
            self.num_lost_clients += 1
            for pending in list(requests.values()):
                self._end(pending)

    # Requests

    def _receive(self, client: bytes, payload: bytes) -> None:
        """Handle one message. Whatever a client sends, the loop goes on."""
        try:
            message = wire.decode_request(payload)
        except wire.WireError as error:
            self._send(client, Failed.of(wire.request_id_of(payload), error))
            return
        known = self._pending.get(client, {}).get(message.request_id)
        if isinstance(message, Cancel):
            if known is not None and message.index is None:
                self._end(known)
            elif known is not None and message.index is not None and known.end_sequence is not None:
                known.end_sequence(message.index)
            return
        if known is not None:
            in_use = InvalidInputError(f"There is a live request {message.request_id!r}.", hint="Choose another request_id.")
            self._send(client, Failed.of(message.request_id, in_use))
            return
        takes_bundles = isinstance(message, GenerationRequest) and message.takes_bundles
        pending = PendingRequest(client, message, arrived=self.clock(), takes_bundles=takes_bundles)
        self._pending.setdefault(client, {})[message.request_id] = pending
        try:
            self._handle(pending, message)
        except Exception as error:
            self.fail(pending, error)

    def _handle(self, pending: PendingRequest, message: Any) -> None:
        if isinstance(message, Ping):
            self.health.answer(pending, message)
        elif isinstance(message, Query):
            self.answer(pending, Report(request_id=message.request_id, values=self._query(message)))
        elif isinstance(message, Charge):
            self.callers.check_operator(message.credentials)
            _, caller = self.callers.find(message.credentials, message.tenant)
            if message.is_spent:
                self.rates.give_back(caller, -message.num_tokens)
            else:
                self.rates.take(caller, message.num_tokens)
            self.answer(pending, Report(request_id=message.request_id))
        elif isinstance(message, Configure):
            self.callers.check_operator(message.credentials)
            entry = self.models.find(message.model, (*GENERATION, *SCORES))
            if entry.hosted is None:
                raise StoppedError(f"The model {entry.name} is not loaded.", hint="Send it a request first.")
            self.answer(pending, Report(request_id=message.request_id, values=entry.hosted.configure(message.options)))
        else:
            self._submit(pending, message)

    def _submit(
        self, pending: PendingRequest, message: GenerationRequest | EmbedRequest | ScoreRequest | ExplainRequest
    ) -> None:
        """Hand a request to its model."""
        if self._stops_at is not None:
            raise StoppedError("The engine is being stopped and takes no more requests.", hint="Try again.")
        pending.tenant, pending.caller = self.callers.find(message.credentials, message.tenant)
        if isinstance(message, ExplainRequest):
            self.models.submit(self.models.find(message.model, GENERATION), pending, lambda hosted, one: hosted.explain(one))
            return
        kinds = {GenerationRequest: GENERATION, EmbedRequest: VECTORS, ScoreRequest: SCORES}[type(message)]
        self.models.submit(self.models.find(message.model, kinds), pending, lambda hosted, one: hosted.submit(one))

    def _query(self, message: Query) -> dict[str, Any]:
        if message.about == "models":
            return {"models": [entry.card() for entry in self.models.entries]}
        if message.about not in ("stats", "metrics", "options"):
            hint = "Ask for models, stats, metrics or options."
            raise InvalidInputError(f"There is no report about {message.about!r}.", hint=hint)
        self.callers.check_operator(message.credentials)
        if message.source:
            self.front_end_metrics.take(message.source, message.values)
        if message.about == "options":
            return {"version": self.front_end_metrics.version, "options": self.front_end_metrics.options}
        models = {entry.name: entry.hosted.stats() for entry in self.models.entries if entry.hosted is not None}
        host = {
            "clients": len(self._pending), "live_requests": sum(map(len, self._pending.values())),
            "lost_clients": self.num_lost_clients, "loaded_models": sum(1 for _ in self.models),
            "unloaded_models": self.models.num_unloaded, "job_seconds": self.compute.running_s(),
        }  # fmt: skip
        if message.about == "stats":
            return {"models": models, "host": host}
        metrics = [*self.front_end_metrics.metrics(), *self.figures.metrics(models), *gauges(host)]
        return {metric.name: metric_values(metric) for metric in metrics}


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a receive would succeed. This is cheaper than the exception of one that does not."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & MESSAGE)
