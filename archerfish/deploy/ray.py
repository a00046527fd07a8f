"""The service as two applications of Ray Serve: engine hosts (`app`) and front ends (`front_ends`).

    serve deploy service.yaml           # written by `archerfish deploy ray CONFIG --yaml`

Ray places, scales, heals and updates the replicas. A front end asks Ray which engine hosts run, and talks to them over
its own encrypted sockets: tokens do not pass through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import zmq

from archerfish.config import HubConfig
from archerfish.deploy.discovery import FoundReplica, read_replicas
from archerfish.deploy.secrets import ServiceSecrets, cluster_token
from archerfish.deploy.settings import ENGINES, FRONT_ENDS, Settings, app_names
from archerfish.errors import MachineError, StoppedError
from archerfish.route.router import load_from
from archerfish.route.scaling import replica_use
from archerfish.serve import processes
from archerfish.serve.client import AsyncClient
from archerfish.serve.processes import FrontConfig, ModelSpec, engine_process, front_process
from archerfish.serve.replicas import with_threads
from archerfish.serve.run import bind, fetch_models, host_config
from archerfish.serve.wire import GenerationRequest, Ping, Query, Report
from archerfish.types import no_progress

logger = logging.getLogger("archerfish.serve")
FIND_S = 1.0  # between two questions for the running replicas
ANSWER_S = 5.0  # for an answer of Ray or of an engine process
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 30.0
QUIET = {"enable_access_log": False}  # of calls through handles, as the question for the running replicas
RESTART_S = 30.0  # that an engine process may take to start again, beside three times its first start
SHUTDOWN_S = processes.KILL_AFTER_S + 5.0  # in addition to the grace time


def app(args: dict[str, Any]) -> Any:
    """The engine hosts. args: the tables of the TOML file."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    settings = Settings.read(args)
    settings.check()
    deploy = settings.deploy
    targets = {"target_wait_s": deploy.target_wait_s, "target_use": deploy.target_use}
    deployment = serve.deployment(EngineReplica).options(
        name=ENGINES,
        logging_config=QUIET,
        max_ongoing_requests=1_000,
        graceful_shutdown_timeout_s=settings.serve.grace_s + SHUTDOWN_S,
        ray_actor_options={"num_cpus": deploy.cpus, "num_gpus": deploy.gpus},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_surge_percent=1 if deploy.surge else 0,  # rounded up: one replica
        autoscaling_config=AutoscalingConfig(
            min_replicas=deploy.min_replicas,
            max_replicas=deploy.max_replicas or deploy.min_replicas,
            metrics_interval_s=1.0,
            look_back_period_s=5.0,
            upscale_delay_s=deploy.upscale_delay_s,
            downscale_delay_s=deploy.downscale_delay_s,
            policy=AutoscalingPolicy(policy_function="archerfish.deploy.scaling:ScalingPolicy", policy_kwargs=targets),
        ),
        request_router_config=RequestRouterConfig(
            request_router_class="archerfish.deploy.ray_router:CacheAwareRouter",
            request_routing_stats_period_s=1.0,
            request_router_kwargs={"service": deploy.name},
        ),
    )
    return deployment.bind(args)


def front_ends(args: dict[str, Any]) -> Any:
    """The front ends. args: the tables [serve] and [deploy] of the TOML file."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    settings = Settings.read(args)
    number, serving = settings.deploy.front_ends, settings.serve
    scaling = AutoscalingConfig(
        min_replicas=1,
        max_replicas=10_000,
        upscale_delay_s=1.0,
        downscale_delay_s=5.0,
        policy=AutoscalingPolicy(policy_function="archerfish.deploy.scaling:nodes_policy"),
    )
    deployment = serve.deployment(FrontEnds).options(
        name=FRONT_ENDS,
        logging_config=QUIET,
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=serving.drain_s + serving.grace_s + SHUTDOWN_S,
        health_check_period_s=HEALTH_PERIOD_S,
        **({"num_replicas": number} if number else {"autoscaling_config": scaling}),
    )
    return deployment.bind(args)


class EngineReplica:
    """A replica: an actor of Ray that keeps an engine process, and answers for it."""

    def __init__(self, args: dict[str, Any]) -> None:
        import ray
        from ray import serve

        settings = Settings.read(args)
        secrets = service_secrets(settings)
        public, secret = (key.decode() for key in zmq.curve_keypair())
        address = f"tcp://{free_address(ray.util.get_node_ip_address())}"
        bind_to_node(ray.util.get_node_ip_address())
        self._specs = settings.specs()
        self._hub = settings.hub
        num_cores = int(settings.deploy.cpus)
        fetch_models(self._specs, self._hub, no_progress)
        specs = tuple(msgspec.structs.replace(spec, options=with_threads(spec, num_cores)) for spec in self._specs)
        config = msgspec.structs.replace(
            host_config(settings.serve, specs, settings.hub, ""),
            address=address,
            adapters_file="",
            secret_key=secret,
            client_keys=(secrets.public_key,),
            front_end_pass=secrets.front_end_pass,
            routing_secret=secrets.routing_secret,
        )
        self._process = engine_process(config)
        self._process.start()
        self._process.wait()
        self._healthy_at, self._failed_before = time.monotonic(), self._process.num_failed_starts
        name = serve.get_replica_context().replica_id.unique_id
        self._found, self._pass = FoundReplica(name, address, public), secrets.front_end_pass
        self._client = AsyncClient(address, server_key=public, own_keys=(secrets.public_key, secrets.secret_key))

    async def describe(self) -> dict[str, Any]:
        """For front ends: where the engine process is, and which models their tokenizers belong to."""
        models = {"models": msgspec.to_builtins(self._specs), "hub": dataclasses.asdict(self._hub)}
        return {**msgspec.to_builtins(self._found), **models}

    async def record_routing_stats(self) -> dict[str, Any]:
        """For `CacheAwareRouter`, of callers through a handle."""
        return msgspec.to_builtins(self._found)  # type: ignore[no-any-return]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `ScalingPolicy`."""
        loads, stats = await asyncio.gather(self._report("load", "loads"), self._report("stats", "models"))
        return replica_use(map(load_from, loads.values()), (model.get("kv_usage", 0.0) for model in stats.values()))

    async def check_health(self) -> None:
        """Raise an error if no step succeeds: Ray replaces the replica. An engine process that dies is started again
        here."""
        process, num_failed = self._process, self._process.num_failed_starts
        may_start = (
            num_failed == self._failed_before and time.monotonic() - self._healthy_at < RESTART_S + 3 * process.start_s
        )
        if may_start and not process.is_serving:
            return
        await self._client.ask(Ping(request_id="", probe=""), HEALTH_TIMEOUT_S / 2)
        self._healthy_at, self._failed_before = time.monotonic(), num_failed

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """For callers through a handle, with `options(stream=True)`. request: fields of a GenerationRequest
        (docs/wire.md)."""
        message = msgspec.convert({**request, "request_id": "", "credentials": self._pass}, GenerationRequest)
        async for part in self._client.generate(message):
            yield msgspec.to_builtins(part)

    async def _report(self, about: str, name: str) -> dict[str, Any]:
        query = Query(request_id="", about=about, since=-1, credentials=self._pass)  # -1: without a digest of the cache
        report = await self._client.ask(query, ANSWER_S)
        assert isinstance(report, Report)
        return report.values[name]  # type: ignore[no-any-return]

    async def __del__(self) -> None:
        """Ray calls this when the replica is to end, after front ends were told so: running requests are finished."""
        if hasattr(self, "_client"):
            await asyncio.to_thread(self._process.stop)
            await self._client.close(StoppedError("The replica has been stopped.", hint="Send the request again."))


class FrontEnds:
    """The front ends of a node: an actor of Ray that keeps their processes and sends them the replicas that run."""

    def __init__(self, args: dict[str, Any]) -> None:
        import ray

        settings = Settings.read(args)
        secrets = service_secrets(settings)
        bind_to_node(ray.util.get_node_ip_address())
        self._app = app_names(settings.deploy.name)[0]
        self._found: list[FoundReplica] = []
        self._fetched: set[bytes] = set()
        self._sent: dict[int, tuple[int, list[FoundReplica]]] = {}  # each child: its process id, and what it was sent
        self._is_over = threading.Event()
        self._listener = bind(settings.serve)

        def config() -> FrontConfig:
            return FrontConfig(
                serve=dataclasses.asdict(settings.serve),
                listener=self._listener.fileno(),
                credentials=secrets.front_end_pass,
                routing_secret=secrets.routing_secret,
                own_keys=(secrets.public_key, secrets.secret_key),
            )

        command = (sys.executable, "-m", "archerfish.deploy.front")
        descriptor = self._listener.fileno()
        grace_s = settings.serve.drain_s + settings.serve.grace_s
        number = settings.serve.num_front_ends
        self._children = [front_process(config, descriptor, command, grace_s=grace_s) for _ in range(number)]
        for child in self._children:
            child.start()
        for child in self._children:
            child.wait()
        self._finder = threading.Thread(target=self._find, name="archerfish-find", daemon=True)
        self._finder.start()

    def check_health(self) -> None:
        if not all(child.is_serving for child in self._children) or not self._finder.is_alive():
            raise StoppedError("A front end is not serving.", hint="It is started again.")

    def _find(self) -> None:
        """Ask Ray for the running replicas, until the end."""
        from ray import serve

        handle, logged = serve.get_deployment_handle(ENGINES, self._app), ""
        while not self._is_over.wait(FIND_S):
            try:
                answers = handle.broadcast("describe").results(timeout_s=ANSWER_S, return_exceptions=True)
                found = read_replicas(answers)
                for answer in answers:
                    if isinstance(answer, dict):
                        self._fetch(answer)
                self._found = found
                problem = ""
            except (
                Exception
            ) as error:  # none runs, Ray's controller is away, a model cannot be fetched: what is known stays
                problem = str(error)
            if problem and problem != logged:
                logger.warning("The replicas of %s cannot be found: %s", self._app, problem)
            logged = problem
            self._send()

    def _fetch(self, answer: Any) -> None:
        """Have the files of a replica's models on this node too: front ends turn texts into tokens."""
        key = msgspec.json.encode((answer["models"], answer["hub"]))
        if key not in self._fetched:
            fetch_models(
                msgspec.convert(answer["models"], tuple[ModelSpec, ...]), HubConfig(**answer["hub"]), no_progress
            )
            self._fetched.add(key)

    def _send(self) -> None:
        """Send every child what it does not know yet; one that was started again knows nothing."""
        for number, child in enumerate(self._children):
            state, process = (child.pid, self._found), child.process
            if (
                child.is_serving
                and self._sent.get(number) != state
                and process is not None
                and process.stdin is not None
            ):
                with contextlib.suppress(OSError):  # it has just died
                    process.stdin.write(msgspec.json.encode(self._found) + b"\n")
                    self._sent[number] = state

    async def __del__(self) -> None:
        """Ray calls this when the front end is to end: running requests are finished."""
        if hasattr(self, "_finder"):
            self._is_over.set()
            self._listener.close()
            await asyncio.to_thread(processes.stop_all, self._children)


def service_secrets(settings: Settings) -> ServiceSecrets:
    """Refuses a cluster that anybody may join."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        hint = "Start Ray on every node with RAY_AUTH_MODE=token and the same token (docs/ray.md)."
        raise MachineError(
            "Ray's authentication is off: whoever reaches the cluster may run programs on it.", hint=hint
        )
    return ServiceSecrets.derive(cluster_token(), settings.deploy.name)


def bind_to_node(host: str) -> None:
    """Make Ray's port of this replica for calls between deployments, which opens later, listen at the node's address
    alone."""
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    node = f"[{host}]" if ":" in host else host
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", node))


def free_address(host: str) -> str:
    """Host and port at which nothing listens now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
