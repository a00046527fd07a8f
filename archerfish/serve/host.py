"""The engine process: all models of a device behind one ROUTER socket.

One loop drains the socket, hands requests to the models, lets them launch and take in work, and sends what they brought; it
waits for nothing but the next event. Everything is computed in one other thread (`compute`), texts are read and written in
threads beside it. `engine_process` is the process.
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

from archerfish.config import HubConfig
from archerfish.engine.llm_engine import LLMEngine
from archerfish.errors import ArcherfishError, InvalidInputError, MachineError, StoppedError
from archerfish.sched.policy import FairShare
from archerfish.serve import wire
from archerfish.serve.admission import AdmissionLimits
from archerfish.serve.callers import Callers, tenant_of_key
from archerfish.serve.client import open_socket, set_keys
from archerfish.serve.compute import Beside, ComputeThread, Waker
from archerfish.serve.figures import Figures, as_values
from archerfish.serve.front_figures import FrontFigures
from archerfish.serve.gate import Gate, ReadingGate
from archerfish.serve.host_config import HostConfig, admit_only, check_address
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.limits import RateLimits
from archerfish.serve.models import GENERATION, SCORES, VECTORS, Hosted, Shelf, Slot, make_slot
from archerfish.serve.pending_request import PendingRequest
from archerfish.serve.probing import Prober
from archerfish.serve.vitals import BEAT_S, ComputeWatch
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
    Pong,
    Query,
    Report,
    ScoreRequest,
)

logger = logging.getLogger("archerfish.serve")
MESSAGE = int(zmq.POLLIN)
MAX_RECEIVED = 64  # messages of one round: a flood keeps the models waiting for a few milliseconds
IDLE_POLL_MS = 1000
GONE_CHECKS_S = (0.0, 0.02, 0.2, 2.0)  # after a connection has broken, until it is known whose it was
LEAST_WAIT_S = 1.0  # that a refused client is told


class EngineHost:
    """Serves models at an address until it is stopped. A context manager runs it in a thread of its own."""

    def __init__(
        self, config: HostConfig, *, tenant_of: Callable[[str], str] = tenant_of_key,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_address(config)
        self.config = config
        self.address = config.address
        self.figures, self.front_figures = Figures(), FrontFigures(clock)
        self.waker = Waker()
        self.compute = ComputeThread(self.waker.wake, clock)
        self.clock = clock
        self.reader: Executor = Beside("read", 2, self.waker)
        self.compiler: Executor = Beside("grammars", 2, self.waker)
        self.writer: Executor = Beside("write", 1, self.waker)
        self.shelf = Shelf(
            self.compute, self, memory_bytes=int(config.memory_gib * (1 << 30)), clock=clock, live=self.live_tickets
        )
        self.watch = ComputeWatch(self.compute, config.hang_s)
        self.prober = Prober(self.shelf, self.compute, self.watch, self, clock)
        self.on_beat: Callable[[str], None] | None = None  # told about every BEAT_S what there is to complain of
        self.callers = Callers(config, tenant_of)
        self.rates, self.limits = RateLimits(clock), AdmissionLimits(**config.admission)
        self._posted: deque[Callable[[], None]] = deque()
        self._outbox: deque[tuple[PendingRequest, Message]] = deque()
        self._tickets: dict[bytes, dict[str, PendingRequest]] = {}  # of each client with live requests
        self._gone_checks: list[float] = []  # when to look again who is gone
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._guard: ThreadAuthenticator | None = None
        self._next_beat = float("-inf")
        self._num_moves = 0  # rounds in which a model got on
        self._stops_at: float | None = None  # while draining: when what still runs is given up
        self._thread: threading.Thread | None = None
        self.num_lost_clients = 0

    # Models

    def load_models(self) -> None:
        """Make a place for every model of the configuration and load those for the start."""
        hub = HubConfig(**self.config.hub)
        for spec in self.config.models:
            self.shelf.add(make_slot(
                spec, hub, self, self.figures, self.writer, latency_s=self.config.latency_budget_ms / 1000,
                max_queue_texts=self.config.max_queue_texts, gate_of=self.gate_of, reading_gate=self.reading_gate,
            ))  # fmt: skip

    def gate_of(self, engine: LLMEngine) -> Gate:
        """In front of a model that writes."""
        self._share_out(engine)
        limits = replace(self.limits, max_queued_requests=engine.config.max_queue_size)
        return Gate(
            self.rates, limits, max_running=engine.config.max_num_seqs, max_tokens=engine.facts.max_len, clock=self.clock
        )

    def _share_out(self, engine: LLMEngine) -> None:
        """Tell a scheduler that asks for it the shares of tenants as they are now."""
        policy = engine.scheduler.policy
        if isinstance(policy, FairShare):
            policy.set_weights({tenant.name: tenant.weight for tenant in self.callers.tenants.all()})

    def reading_gate(self) -> ReadingGate:
        """In front of a model that writes nothing."""
        return ReadingGate(self.rates, max_wait_s=self.limits.max_wait_s, clock=self.clock)

    def live_tickets(self) -> Iterator[PendingRequest]:
        return (ticket for tickets in self._tickets.values() for ticket in tickets.values())

    # What models see; in any thread

    def answer(self, ticket: PendingRequest, message: Message) -> None:
        self._outbox.append((ticket, message))

    def fail(self, ticket: PendingRequest, error: BaseException) -> None:
        if not isinstance(error, ArcherfishError):
            logger.error("A request failed.", exc_info=error)
        status = getattr(error, "status", 500)
        wait_s: float | None = getattr(error, "retry_after_s", None)
        if status in (429, 503):
            if wait_s is None and ticket.retry_after_s is not None:
                wait_s = ticket.retry_after_s()
            wait_s = max(LEAST_WAIT_S, wait_s or 0.0)
        self.answer(ticket, Failed.of(ticket.message.request_id, error, wait_s))

    def post(self, work: Callable[[], None]) -> None:
        self._posted.append(work)
        self.waker.wake()

    # The loop

    def open(self) -> str:
        """Listen; returns the address, with the port that was taken where the configuration leaves it open."""
        opened = self._socket = open_socket(zmq.ROUTER)
        opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
        opened.setsockopt(zmq.MAXMSGSIZE, self.config.max_message_bytes)
        if self.config.secret_key:
            opened.setsockopt(zmq.CURVE_SERVER, 1)
            set_keys(opened, CURVE_PUBLICKEY=self.config.public_key, CURVE_SECRETKEY=self.config.secret_key)
            if self.config.client_keys:
                self._guard = admit_only(self.config.client_keys)
                opened.setsockopt(zmq.ZAP_DOMAIN, b"archerfish")
        self._monitor = opened.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            opened.bind(self.config.address)
        except zmq.ZMQError as error:
            self._close_sockets(0)
            hint = "Choose another address, or stop who has this one."
            raise MachineError(f"Cannot listen on {self.config.address}: {error}.", hint=hint) from error
        endpoint = opened.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def run(self) -> None:
        """Serve until `stop`; what runs then is finished first."""
        if self._socket is None:
            self.open()
        assert self._socket is not None and self._monitor is not None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self.waker.fileno(), zmq.POLLIN)
        timeout = 0
        try:
            while not self._is_done():
                poller.poll(timeout)
                timeout = 0 if self._round() else self._pause_ms()
        finally:
            self._close()

    def _round(self) -> bool:
        """Everything there is to do now; whether there may be more."""
        self.waker.clear()
        num_received = self._receive()
        while self._posted:
            self._posted.popleft()()
        has_moved = False
        for hosted in self.shelf:
            has_moved = hosted.advance() or has_moved
        self._num_moves += has_moved
        self._look_for_gone()
        self._flush()
        self.figures.settle()
        self._beat()
        if not has_moved and not self._tickets and self._stops_at is None:
            has_moved = self._use_idle_time()
        return has_moved or num_received == MAX_RECEIVED

    def _beat(self) -> None:
        """Say that the loop moves, and what is known of the compute thread."""
        now = self.clock()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        for hosted in self.shelf:
            if isinstance(hosted, HostedLLM):
                self._share_out(hosted.engine)
        has_work = any(hosted.has_work for hosted in self.shelf)
        complaint = self.watch.look(now, has_work=has_work, is_loading=self.shelf.is_loading, num_moves=self._num_moves)
        if complaint:
            logger.error("%s", complaint)
        if self.on_beat is not None:
            self.on_beat(complaint)

    def _pause_ms(self) -> int:
        """Until the next thing that no event announces."""
        now = self.clock()
        times = [*self._gone_checks, *([] if self._stops_at is None else [self._stops_at])]
        return max(1, min([IDLE_POLL_MS, *(int(1000 * (moment - now)) + 1 for moment in times)]))

    def _use_idle_time(self) -> bool:
        """Do a piece of what can be done before it is wanted; whether there is more of it."""
        self.shelf.keep_within_memory()
        self.shelf.load_next()
        return any(hosted.use_idle_time() for hosted in self.shelf)

    def _is_done(self) -> bool:
        if self._stops_at is None:
            return False
        return not self._tickets or self.clock() >= self._stops_at

    def stop(self, grace_s: float | None = None) -> None:
        """Refuse what comes, finish what runs, then end. May be called in any thread and by a signal's handler."""
        stops_at = self.clock() + (self.config.grace_s if grace_s is None else grace_s)
        self._stops_at = stops_at if self._stops_at is None else min(self._stops_at, stops_at)
        self.waker.wake()

    def _close(self) -> None:
        stopped = StoppedError("The engine was stopped before the answer was complete.", hint="Send the request again.")
        for tickets in list(self._tickets.values()):
            for ticket in list(tickets.values()):
                self.fail(ticket, stopped)
        self._flush()
        self.shelf.close()
        for threads in (self.reader, self.compiler, self.writer):
            threads.shutdown()
        self.compute.close()
        self._close_sockets(1000)
        self.waker.close()

    def _close_sockets(self, linger_ms: int) -> None:
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger_ms)
        if self._guard is not None:
            self._guard.stop()
        self._socket = self._monitor = self._guard = None

    def __enter__(self) -> Self:
        self.address = self.open()
        self._thread = threading.Thread(target=self.run, name="archerfish-host", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0)
        if self._thread is not None:
            self._thread.join()

    # Sending

    def _flush(self) -> None:
        """Send all that has been answered; what several requests of one client got goes together."""
        bundles: defaultdict[bytes, list[Any]] = defaultdict(list)
        while self._outbox:
            ticket, message = self._outbox.popleft()
            if ticket.is_over:
                continue
            is_last = type(message) is not Chunk
            if is_last:
                self._forget(ticket)
            if ticket.takes_bundles:
                bundles[ticket.client].append(message)
            elif ticket.on_end is None:
                self._send(ticket.client, message)
            elif is_last:
                ticket.on_end(message)
        for client, answers in bundles.items():
            self._send(client, answers[0] if len(answers) == 1 else Bundle(request_id="", answers=answers))

    def _send(self, client: bytes, message: Message) -> bool:
        assert self._socket is not None
        try:
            payload = wire.encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            payload = wire.encode(Failed.of(message.request_id, error))
            logger.error("An answer cannot be encoded.", exc_info=error)
        try:
            self._socket.send_multipart([client, b"", payload], zmq.NOBLOCK)
        except zmq.ZMQError:  # gone, or so far behind with reading that it might as well be
            self._lose(client)
            return False
        return True

    def _forget(self, ticket: PendingRequest) -> None:
        """A request is over: its model takes back what it has."""
        ticket.is_over = True
        tickets = self._tickets.get(ticket.client, {})
        if tickets.get(ticket.message.request_id) is ticket:
            del tickets[ticket.message.request_id]
            if not tickets:
                del self._tickets[ticket.client]
        if ticket.release is not None:
            ticket.release()

    def _lose(self, client: bytes) -> None:
        """A client has gone, and its requests with it."""
        tickets = self._tickets.get(client)
        if tickets:
            self.num_lost_clients += 1
            for ticket in list(tickets.values()):
                self._forget(ticket)

    def _look_for_gone(self) -> None:
        """After a connection has broken: whoever cannot be sent to any more is gone."""
        assert self._monitor is not None
        now = self.clock()
        while has_message(self._monitor):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            self._gone_checks = [now + wait for wait in GONE_CHECKS_S]
        if self._gone_checks and self._gone_checks[0] <= now:
            self._gone_checks = [moment for moment in self._gone_checks if moment > now]
            for client in list(self._tickets):
                if client:
                    self._send(client, Pong(request_id=""))

    # Receiving

    def _receive(self) -> int:
        assert self._socket is not None
        if not has_message(self._socket):
            return 0
        for number in range(MAX_RECEIVED):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return number
            self._take(frames)
        return MAX_RECEIVED

    def _take(self, frames: list[bytes]) -> None:
        """One message, whatever it is: nothing that a client sends ends the loop."""
        client = frames[0]
        payload = frames[-1] if len(frames) == 3 and not frames[1] else b""
        try:
            message = wire.decode_request(payload)
        except wire.WireError as error:
            self._send(client, Failed.of(wire.request_id_of(payload), error))
            return
        if isinstance(message, Cancel):
            ticket = self._tickets.get(client, {}).get(message.request_id)
            if ticket is not None and message.index is None:
                self._forget(ticket)
            elif ticket is not None and message.index is not None and ticket.end_sequence is not None:
                ticket.end_sequence(message.index)
            return
        if message.request_id in self._tickets.get(client, {}):
            twice = InvalidInputError(f"There is a live request {message.request_id!r}.", hint="Choose another request_id.")
            self._send(client, Failed.of(message.request_id, twice))
            return
        takes_bundles = isinstance(message, GenerationRequest) and message.takes_bundles
        ticket = PendingRequest(client, message, arrived=self.clock(), takes_bundles=takes_bundles)
        self._tickets.setdefault(client, {})[message.request_id] = ticket
        try:
            self._handle(ticket, message)
        except Exception as error:
            self.fail(ticket, error)

    def _handle(self, ticket: PendingRequest, message: Any) -> None:
        if isinstance(message, Ping):
            self.prober.answer(ticket, message)
        elif isinstance(message, Query):
            self._query(ticket, message)
        elif isinstance(message, Charge):
            self.callers.check_operator(message.credentials)
            _, caller = self.callers.find(message.credentials, message.tenant)
            self.rates.charge(caller, message.num_tokens, is_spent=message.is_spent)
            self.answer(ticket, Report(request_id=message.request_id))
        elif isinstance(message, Configure):
            self.callers.check_operator(message.credentials)
            kinds = (*GENERATION, *SCORES)
            hosted = self._loaded(self.shelf.find(message.model, kinds))
            self.answer(ticket, Report(request_id=message.request_id, values=hosted.configure(message.options)))
        else:
            self._work(ticket, message)

    def _work(self, ticket: PendingRequest, message: GenerationRequest | EmbedRequest | ScoreRequest | ExplainRequest) -> None:
        if self._stops_at is not None:
            raise StoppedError("The engine is being stopped and takes no more requests.", hint="Try again.")
        ticket.tenant, ticket.caller = self.callers.find(message.credentials, message.tenant)
        if isinstance(message, ExplainRequest):
            self.shelf.submit(self.shelf.find(message.model, GENERATION), ticket, lambda hosted, one: hosted.explain(one))
            return
        kinds = {GenerationRequest: GENERATION, EmbedRequest: VECTORS, ScoreRequest: SCORES}[type(message)]
        self.shelf.submit(self.shelf.find(message.model, kinds), ticket, lambda hosted, one: hosted.submit(one))

    def _loaded(self, slot: Slot) -> Hosted:
        if slot.hosted is None:
            raise StoppedError(f"The model {slot.name} is not loaded.", hint="Send it a request first.")
        return slot.hosted

    # Questions about the process

    def _query(self, ticket: PendingRequest, message: Query) -> None:
        values: dict[str, Any]
        if message.about == "models":
            values = {"models": [slot.card() for slot in self.shelf.slots]}
        elif message.about in ("stats", "metrics", "options"):
            self.callers.check_operator(message.credentials)
            if message.source:
                self.front_figures.take(message.source, message.values)
            values = self._report(message.about)
        else:
            hint = "Ask for models, stats, metrics or options."
            raise InvalidInputError(f"There is no report about {message.about!r}.", hint=hint)
        self.answer(ticket, Report(request_id=message.request_id, values=values))

    def _report(self, about: str) -> dict[str, Any]:
        if about == "options":
            return {"version": self.front_figures.version, "options": self.front_figures.options}
        models = {slot.name: slot.hosted.stats() for slot in self.shelf.slots if slot.hosted is not None}
        host = self._host_stats()
        if about == "stats":
            return {"models": models, "host": host}
        of_front_ends = {metric.name: as_values(metric) for metric in self.front_figures.metrics()}
        return {**of_front_ends, **self.figures.report(models, host)}

    def _host_stats(self) -> dict[str, float]:
        return {
            "clients": len(self._tickets), "live_requests": sum(map(len, self._tickets.values())),
            "lost_clients": self.num_lost_clients, "loaded_models": sum(1 for _ in self.shelf),
            "unloaded_models": self.shelf.num_unloaded, "job_seconds": self.compute.running_s(),
        }  # fmt: skip


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Without the exception that a receive in vain costs at every turn of the loop."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & MESSAGE)
