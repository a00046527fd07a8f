"""The engine process: all models of a device behind a ROUTER socket.

One loop receives requests, hands them to the models, lets the models make progress, and sends their answers. It waits
for events only. Everything is computed in one other thread (`compute`); text is read and written in further threads.
`python -m archerfish.serve.host` is the process, a child of the main process (`processes`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from archerfish.config import HubConfig
from archerfish.errors import ArcherfishError, InvalidInputError, MachineError, OutOfMemoryError, StoppedError
from archerfish.kernels.select import choose_device
from archerfish.serve import wire
from archerfish.serve.client import open_socket, set_keys
from archerfish.serve.compute import HangWatch, ModelHost, PendingRequest, attempt
from archerfish.serve.hosted_llm import HostedLLM
from archerfish.serve.loads import LoadReports
from archerfish.serve.logs import set_up_log
from archerfish.serve.metrics import FrontEndMetrics, metric_values, process_metrics
from archerfish.serve.models import ENCODERS, GENERATION, VECTORS, Hosted, ModelTable, make_entry
from archerfish.serve.processes import BEAT_S, HostConfig, open_report_pipe, read_config, send_report, watch_parent

logger = logging.getLogger("archerfish.serve")
MAX_RECEIVED = 64  # messages of one round, so that a flood delays the models by a few milliseconds only
IDLE_POLL_MS = 1000
FRESH_S = 1.0  # a step this recent proves that a model works
LAST_S = 5.0  # the process may take this long to end after its parent
EXIT_HUNG = 75
NICENESS = (
    5  # of a process that computes on the cores: front ends, which take little of them, answer before requests are late
)
KINDS = {wire.EmbedRequest: VECTORS, wire.ClassifyRequest: ("cross-encoder",)}  # of models


class Listener:
    """The ROUTER sockets of an engine process: one for front ends and, if configured, one for other programs.

    A client is identified by the number of its socket and its ZMQ identity.
    """

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self.sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._authenticator: ThreadAuthenticator | None = None
        self._clients: dict[int, bytes] = {}  # by the file descriptor of their connection
        self.disconnected: list[bytes] = []  # clients whose connections have broken; the loop takes them

    def open(self, poller: zmq.Poller) -> list[str]:
        """Listen on all configured addresses and return them, with their real ports."""
        config = self._config
        if config.client_keys:  # a thread lets only clients with these public keys connect

            class Keys:
                def callback(self, domain: str, key: bytes) -> bool:
                    return key.decode() in config.client_keys

            self._authenticator = ThreadAuthenticator(zmq.Context.instance())
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="archerfish", credentials_provider=Keys())
        return [self._open(address, poller) for address in (config.address, config.open_address) if address]

    def _open(self, address: str, poller: zmq.Poller) -> str:
        opened = open_socket(zmq.ROUTER)
        opened.setsockopt(zmq.ROUTER_MANDATORY, 1)
        opened.setsockopt(zmq.MAXMSGSIZE, self._config.max_message_bytes)
        if self._config.secret_key and address.startswith("tcp:"):
            opened.setsockopt(zmq.CURVE_SERVER, 1)
            set_keys(opened, CURVE_SECRETKEY=self._config.secret_key)
            if self._config.client_keys:
                opened.setsockopt(zmq.ZAP_DOMAIN, b"archerfish")
        self.sockets.append(opened)
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

    def receive(self, ready: dict[Any, int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the client and the payload of messages, at most MAX_RECEIVED of a socket. ready: what a poll has
        found."""
        for number, socket in enumerate(self.sockets):
            for _ in range(MAX_RECEIVED if socket in ready else 0):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                client = bytes([number]) + frames[0].bytes
                with contextlib.suppress(zmq.ZMQError):  # inproc connections have no file descriptor
                    connection = int(frames[-1].get(zmq.SRCFD))
                    if self._clients.get(connection) != client:
                        self._read_events()  # the descriptor may have belonged to a client whose end was not read yet
                        self._clients[connection] = client
                is_whole = len(frames) == 3 and not frames[1].bytes
                yield client, frames[-1].bytes if is_whole else b""
        if any(monitor in ready for monitor in self._monitors):
            self._read_events()

    def _read_events(self) -> None:
        for monitor in self._monitors:
            with contextlib.suppress(zmq.Again):
                while True:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                    client = self._clients.pop(int(event["value"]), None)
                    if client is not None:
                        self.disconnected.append(client)

    def close(self, linger_ms: int) -> None:
        for socket, monitor in zip(self.sockets, self._monitors, strict=True):
            socket.disable_monitor()
            monitor.close(0)
            socket.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        self.sockets = []
        self._monitors = []
        self._authenticator = None


class EngineHost(ModelHost):
    """Serves models at an address until it is stopped."""

    def __init__(self, config: HostConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, clock)
        self.address, self.open_address = config.address, config.open_address
        self.front_end_metrics = FrontEndMetrics(clock)
        self.models = ModelTable(self)
        self.loads = LoadReports(self.digest, clock)
        self.watch = HangWatch(self.compute, config.hang_s)
        self.on_beat: Callable[[], None] = lambda: None  # called every BEAT_S while the process works
        self.on_hang: Callable[[], None] = lambda: None  # called instead while it hangs
        self.num_lost_clients = 0
        self._listener = Listener(config)
        self._poller = zmq.Poller()
        self._next_beat = float("-inf")
        self._num_moves = 0  # rounds in which a model made progress
        self._stops_at: float | None = None  # while stopping: when running requests are given up

    def load_models(self) -> None:
        """Make an entry for every model of the configuration and load those that are loaded at the start."""
        for spec in self.config.models:
            self.models.add(make_entry(spec, HubConfig(**self.config.hub), self))

    # The loop

    def open(self) -> str:
        """Listen; return the address for front ends, with its real port."""
        self._poller.register(self.waker.reader, zmq.POLLIN)
        self.address, *others = self._listener.open(self._poller)
        self.open_address = others[0] if others else ""
        return self.address

    def run(self) -> None:
        """Serve, after `open` and until `stop`; running requests are finished first."""
        has_moved = True
        try:
            while self._stops_at is None or (self._pending and self.clock() < self._stops_at):
                pause_ms = 0 if has_moved else IDLE_POLL_MS
                if self._stops_at is not None:
                    pause_ms = min(pause_ms, max(1, int(1000 * (self._stops_at - self.clock()))))
                ready = dict(self._poller.poll(pause_ms))
                self.waker.clear()
                for client, payload in self._listener.receive(ready):
                    self._receive(client, payload)
                while self._listener.disconnected:
                    self._drop_client(self._listener.disconnected.pop())
                while self._posted:
                    self._posted.popleft()()
                has_moved = False
                for hosted in self.models.loaded:  # an LLM without work may still have to deliver the end of a request
                    if hosted.kind == "generation" or hosted.has_work:
                        has_moved = hosted.advance() or has_moved
                self._num_moves += has_moved
                self._flush()
                if self.clock() >= self._next_beat:
                    self._beat(self.clock())
                if not has_moved and not self._pending and self._stops_at is None:
                    has_moved = self.models.use_idle_time()
        finally:
            self._close()

    def _beat(self, now: float) -> None:
        """Report every BEAT_S that the loop runs, unless the compute thread hangs."""
        self._next_beat, broken = now + BEAT_S, ""
        for hosted in self.models.loaded:
            if isinstance(hosted, HostedLLM):
                hosted.read_weights()
                broken = broken or hosted.engine.runner.others.problem
        has_work = any(hosted.has_work for hosted in self.models.loaded)
        problem = self.watch.check(now, has_work=has_work, is_loading=self.models.is_loading, num_moves=self._num_moves)
        if problem or broken:
            logger.error("The engine process %s", f"hangs: {problem}" if problem else f"cannot go on: {broken}")
            self.on_hang()
        else:
            self.on_beat()

    def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests, finish the running ones, then end. Any thread and any signal handler may call this."""
        stops_at = self.clock() + (self.config.grace_s if grace_s is None else grace_s)
        self._stops_at = stops_at if self._stops_at is None else min(self._stops_at, stops_at)
        self.waker.wake()

    def _close(self) -> None:
        stopped = StoppedError("The engine was stopped before the answer was complete.", hint="Send the request again.")
        for pending in self.live_requests():
            self.fail(pending, stopped)
        self._flush()
        for hosted in self.models.loaded:
            hosted.engine.close()
        for threads in (self.reader, self.compiler, self.loader, self.writer):
            threads.shutdown()
        self.compute.close()
        self._listener.close(1000)
        self.waker.close()

    # Answers

    def _flush(self) -> None:
        """Send all answers. Those of one client that takes bundles go together."""
        bundles: defaultdict[bytes, list[Any]] = defaultdict(list)
        while self._outbox:
            pending, message = self._outbox.popleft()
            if pending.is_over:
                continue
            is_last = type(message) is not wire.Chunk
            if is_last:
                self._end(pending)
            if getattr(pending.message, "takes_bundles", False):
                bundles[pending.client].append(message)
            elif pending.on_end is None:
                self._send(pending.client, message)
            elif is_last:
                pending.on_end(message)
        for client, answers in bundles.items():
            self._send(client, answers[0] if len(answers) == 1 else wire.Bundle(request_id="", answers=answers))

    def _send(self, client: bytes, message: wire.Message) -> None:
        try:
            payload = wire.encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            payload = wire.encode(wire.Failed.of(message.request_id, error))
            logger.error("An answer cannot be encoded.", exc_info=error)
        try:
            self._listener.sockets[client[0]].send_multipart([client[1:], b"", payload], zmq.NOBLOCK)
        except zmq.ZMQError:  # the client is gone, or reads so slowly that its queue is full
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
            self._send(client, wire.Failed.of(wire.request_id_of(payload), error))
            return
        known = self._pending.get(client, {}).get(message.request_id)
        if isinstance(message, wire.Cancel):
            if known is not None and message.index is None:
                self._end(known)
            elif known is not None and message.index is not None and known.end_sequence is not None:
                known.end_sequence(message.index)
            return
        if known is not None:
            in_use = InvalidInputError(
                f"There is a live request {message.request_id!r}.", hint="Choose another request_id."
            )
            self._send(client, wire.Failed.of(message.request_id, in_use))
            return
        pending = PendingRequest(client, message, arrived=self.clock())
        self._pending.setdefault(client, {})[message.request_id] = pending
        try:
            if isinstance(message, wire.ModelRequest):
                if self._stops_at is not None:
                    raise StoppedError("The engine is being stopped and takes no more requests.", hint="Try again.")
                pending.tenant = self.callers.find(message.credentials, message.tenant)
                if self.digest is not None and self.callers.is_front_end(message.credentials):
                    pending.tenant = replace(
                        pending.tenant, requests_per_minute=0, tokens_per_minute=0
                    )  # it has counted them
                kinds = KINDS.get(type(message), GENERATION)
                self.models.submit(self.models.find(message.model, kinds), pending)
            elif isinstance(message, wire.ChangeAdapter):
                self.callers.check_operator(message.credentials)
                self.models.change_adapter(pending, message)
            elif isinstance(message, wire.Ping):
                self._check_health(pending, message)
            else:
                self.answer(pending, wire.Report(request_id=message.request_id, values=self._report(pending, message)))
        except Exception as error:
            self.fail(pending, error)

    def _report(self, pending: PendingRequest, message: wire.Configure | wire.Charge | wire.Query) -> dict[str, Any]:
        if isinstance(message, wire.Query) and message.about == "models":
            is_operator = self.callers.is_operator(message.credentials)
            return {"models": [entry.card(with_adapters=is_operator) for entry in self.models.entries]}
        if isinstance(message, wire.Query) and message.about not in ("stats", "metrics", "options", "load", "view"):
            hint = "Ask for models, stats, metrics, options, load or view."
            raise InvalidInputError(f"There is no report about {message.about!r}.", hint=hint)
        if isinstance(message, wire.Query) and message.about == "view":
            tenant = self.callers.find(message.credentials, message.tenant)
            hosted = self._loaded(message.model, GENERATION)
            if not isinstance(hosted, HostedLLM):
                raise InvalidInputError(
                    f"{message.model} generates no text; it has no cache.", hint="Name another model."
                )
            return hosted.view(tenant.name, sees_all=self.callers.sees_all(tenant))
        self.callers.check_operator(message.credentials)
        if isinstance(message, wire.Charge):
            tenant = pending.tenant = self.callers.find(message.credentials, message.tenant)
            if message.is_spent:
                self.rates.give_back(tenant, -message.num_tokens, -message.num_requests)
            else:
                self.rates.take(tenant, message.num_tokens)
            return {}
        if isinstance(message, wire.Configure):
            return self._loaded(message.model, (*GENERATION, *ENCODERS)).configure(message.options)
        if message.about == "load":
            return self.loads.report(
                message.since, self.models.entries, message.source, is_stopping=self._stops_at is not None
            )
        if message.source:
            self.front_end_metrics.take(message.source, message.values)
        if message.about == "options":
            return {"version": self.front_end_metrics.version, "options": self.front_end_metrics.options}
        models = {entry.name: entry.hosted.stats() for entry in self.models.entries if entry.hosted is not None}
        host = {
            "clients": len(self._pending),
            "live_requests": sum(map(len, self._pending.values())),
            "lost_clients": self.num_lost_clients,
            "loaded_models": len(self.models.loaded),
            "unloaded_models": self.models.num_unloaded,
            "job_seconds": self.compute.running_s(),
        }
        if message.about == "stats":
            return {"models": models, "host": host}
        shared, own = self.front_end_metrics.metrics(), [*self.figures.metrics(models), *process_metrics(host)]
        # A router asks all replicas for their own metrics, and one of them for those of the front ends.
        metrics = [*shared, *own] if self.digest is None else shared if message.source else own
        return {metric.name: metric_values(metric) for metric in metrics}

    def _loaded(self, name: str, kinds: tuple[str, ...]) -> Hosted:
        entry = self.models.find(name, kinds)
        if entry.hosted is None:
            raise StoppedError(f"The model {entry.name} is not loaded.", hint="Send it a request first.")
        return entry.hosted

    def _check_health(self, pending: PendingRequest, message: wire.Ping) -> None:
        """Answer a Ping. With a probe, the answer comes after a real step of every loaded model that has made none
        recently."""
        pong = wire.Pong(request_id=message.request_id)
        if message.probe is None:
            self.answer(pending, pong)
            return
        entries = self.models.entries if not message.probe else [self.models.find(message.probe, GENERATION)]
        running_s = self.compute.running_s()
        problem = self.watch.problem(running_s, is_loading=self.models.is_loading)
        if problem:
            raise StoppedError(problem, hint="The engine process hangs and is started again.")
        loaded = [entry.hosted for entry in entries if entry.hosted is not None]
        left = {hosted for hosted in loaded if self.clock() - hosted.lane.last_done > FRESH_S}
        if not left or running_s > 0:
            self.answer(pending, pong)
            return

        def end(hosted: Hosted, answer: wire.Message) -> None:
            left.discard(hosted)
            if isinstance(answer, wire.Failed):
                answer.request_id = message.request_id
                self.answer(pending, answer)
            elif not left:
                pong.seconds = self.clock() - pending.arrived
                self.answer(pending, pong)

        for hosted in list(left):
            step = PendingRequest(b"", wire.Ping(request_id=""), arrived=self.clock(), on_end=partial(end, hosted))
            attempt(self, step, partial(hosted.probe, step))


def main() -> int:
    """Read the configuration, load the models, report the address, and serve."""
    pipe = open_report_pipe()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores belong to the compute thread
    config = read_config(HostConfig)
    set_up_log(config.name, config.log_format)

    def end() -> None:
        host.stop(0)
        time.sleep(LAST_S)
        os._exit(1)

    def beat() -> None:
        with contextlib.suppress(OSError):  # the pipe is full of heartbeats, or the main process has ended
            os.write(pipe.fileno(), b"\n")

    try:
        if all(choose_device(spec.options.get("device", "auto")).name == "cpu" for spec in config.models):
            os.nice(NICENESS)
        host = EngineHost(config)
        watch_parent(end)
        host.load_models()
        address = host.open()
    except (ArcherfishError, MemoryError) as error:
        told = OutOfMemoryError.of(f"The {config.name}", error) if isinstance(error, MemoryError) else error
        send_report(pipe, {"error": told.message, "hint": told.hint or ""})
        return told.exit_code
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    send_report(pipe, {"address": address})
    os.set_blocking(pipe.fileno(), False)
    host.on_beat = beat
    host.on_hang = lambda: os._exit(EXIT_HUNG)  # the main process starts another
    host.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
