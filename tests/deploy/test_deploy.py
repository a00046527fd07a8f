"""The parts of a deployment that need no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from archerfish.cli.main import main
from archerfish.config import ServeConfig
from archerfish.deploy import cluster
from archerfish.deploy.cluster import Cluster, NoClusterError
from archerfish.deploy.discovery import Follower, FoundReplica, changes, read_replicas
from archerfish.deploy.ray import EngineReplica
from archerfish.deploy.scaling import ScalingPolicy
from archerfish.deploy.secrets import ServiceSecrets, cluster_token, default_token_path, make_token
from archerfish.deploy.settings import Settings, serve_config
from archerfish.errors import InvalidOptionError, MachineError, StoppedError
from archerfish.route.router import ReplicaLoad, Router
from archerfish.route.scaling import desired_replicas, replica_use
from archerfish.serve.catalog import ModelCard
from archerfish.serve.client import AsyncClient
from archerfish.serve.processes import FrontConfig, front_process
from archerfish.serve.run import bind, url_of
from archerfish.serve.wire import Report

A, B = (FoundReplica(name, f"tcp://10.0.0.{name}:1", "key") for name in "12")
TOKEN = "a token of a cluster"


# Scaling


@pytest.mark.parametrize(
    ("pressures", "current", "wanted"),
    [
        ([0.5], 1, 1),
        ([1.05], 1, 1),
        ([1.5], 1, 2),
        ([9.0], 1, 2),
        ([1.4, 1.4], 2, 3),
        ([3.0], 2, 2),
        ([], 3, 3),
        ([0.0] * 5, 8, 1),
        ([0.0, 0.0, 0.0], 3, 1),
        ([0.5, 0.5, 0.5], 3, 2),
        ([0.7, 0.7, 0.7], 3, 3),
        ([0.0], 1, 1),
    ],
)
def test_desired_replicas(pressures: list[float], current: int, wanted: int) -> None:
    """Red: growth without a limit, or by replicas that do not start to take a part yet; a service that swings."""
    assert desired_replicas(pressures, current) == wanted


def test_use_of_a_replica() -> None:
    """Red: a queue, a full batch or full KV memory that the autoscaler does not see."""
    queue = ReplicaLoad(prompt_token_s=0.01, step_s=0.5, num_running=4, num_waiting=1, max_running=4, slot_s=1.0)
    queue.waiting_tokens["a"] = 50
    assert replica_use([ReplicaLoad(), queue], [0.2]) == {"wait_s": pytest.approx(0.5 + 2 * 1.0 + 0.5), "use": 1.25}
    assert replica_use([ReplicaLoad(step_s=3.0)]) == {"wait_s": 0.0, "use": 0.0}  # an idle model that is not loaded
    assert replica_use([], [0.9]) == {"wait_s": 0.0, "use": 0.9}


def test_scaling_policy_reads_what_replicas_report() -> None:
    def decide(**metrics: dict[str, float]) -> int:
        context = SimpleNamespace(aggregated_metrics=metrics, running_replicas=["a", "b"], target_num_replicas=2)
        return ScalingPolicy(target_wait_s=2.0, target_use=0.5)(context)[0]

    assert decide() == 2
    assert decide(wait_s={"a": 4.0, "b": 2.0, "gone": 100.0}) == 3
    assert decide(wait_s={"a": 0.0, "b": 0.0}, use={"a": 1.0, "b": 0.9}) == 4
    assert decide(wait_s={"a": 0.1, "b": 0.1}, use={"a": 0.1, "b": 0.0}) == 1


class Replica(EngineReplica):
    """An actor that Ray has not started. process: a stand-in. answer: for every question; none: an error."""

    def __init__(self, answer: dict[str, Any] | None = None, process: Any = None) -> None:
        self._client = self  # type: ignore[assignment]
        self._process = process
        self._pass = "pass"
        self._healthy_at, self._failed_before = time.monotonic(), 0
        self.answer, self.asked = answer, list[Any]()

    async def ask(self, message: Any, timeout_s: float) -> Report:
        self.asked.append(message)
        if self.answer is None:
            raise StoppedError("Away.")
        return Report(request_id="", values=self.answer)

    def __del__(self) -> None:  # type: ignore[override]
        pass


def test_autoscaler_asks_for_no_digest() -> None:
    """Red: a replica that packs its whole cache once a second, to be thrown away."""
    replica = Replica({"loads": {"m": {"num_running": 1, "max_running": 4}}, "models": {"m": {"kv_usage": 0.5}}})
    assert asyncio.run(replica.record_autoscaling_stats()) == {"wait_s": 0.0, "use": 0.5}
    assert {query.about: query.since for query in replica.asked} == {"load": -1, "stats": -1}


def test_health_is_judged_by_what_failed_since_it_was_good() -> None:
    """Red: a replica that one failed start, long ago, makes unhealthy at its next crash; one that never recovers and
    stays."""
    process = SimpleNamespace(is_serving=False, num_failed_starts=0, start_s=1.0)
    replica = Replica(process=process)
    asyncio.run(replica.check_health())  # it starts again
    process.num_failed_starts = 1
    with pytest.raises(StoppedError):
        asyncio.run(replica.check_health())
    replica.answer, process.is_serving = {}, True
    asyncio.run(replica.check_health())
    replica.answer, process.is_serving = None, False
    asyncio.run(replica.check_health())
    replica._healthy_at -= 1_000
    with pytest.raises(StoppedError):
        asyncio.run(replica.check_health())


# What is deployed


def settings(**tables: Any) -> Settings:
    return Settings.read({"engine": {"model": "story-rwkv7"}, "serve": {"kinds": "generation"}, **tables})


def test_args_are_the_configuration() -> None:
    """Red: an option that is lost on its way to the cluster."""
    tables = {
        "models": [{"model": "other", "max_num_seqs": 3, "loads": "idle"}],
        "deploy": {"min_replicas": 3, "gpus": 1.0},
    }
    given = settings(**tables)
    engines, front_ends = serve_config(given)["applications"]
    assert Settings.read(json.loads(json.dumps(engines["args"]))) == given
    assert engines["args"] == {"engine": {"model": "story-rwkv7"}, "serve": {"kinds": "generation"}, **tables}
    assert [spec.model for spec in given.specs()] == ["story-rwkv7", "other"] and given.specs()[1].options[
        "max_num_seqs"
    ] == 3
    assert "args" in front_ends and serve_config(given)["proxy_location"] == "Disabled"


def test_engine_options_leave_front_ends_alone() -> None:
    """Red: a change of the model that closes the port of the service for a moment."""
    first, second = (
        serve_config(settings(engine={"model": "story-rwkv7", "max_num_seqs": n}))["applications"] for n in (1, 2)
    )
    assert first[0] != second[0] and first[1] == second[1]
    others = serve_config(settings(deploy={"max_replicas": 9}))["applications"][1]
    assert others == first[1] != serve_config(settings(deploy={"front_ends": 2}))["applications"][1]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"serve": {"kinds": "generation", "port": 0}}, "port"),
        ({"serve": {"replicas": 2}}, "min_replicas"),
        ({"serve": {"zmq_address": "tcp://127.0.0.1:5555"}}, "zmq_address"),
        ({"egnine": {}}, "egnine"),
        ({"deploy": {"max_replica": 1}}, "max_replicas"),
        ({"deploy": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas is 2, less than min_replicas, which is 3"),
        ({"engine": {"tensor_parallel_size": 4}, "deploy": {"gpus": 2}}, "gpus is 2, but a model is divided over 4"),
    ],
)
def test_what_cannot_work_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError) as raised:
        settings(**tables).check()
    assert message in f"{raised.value.message} {raised.value.hint}"


def test_command_prints_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "service.toml"
    file.write_text('[engine]\nmodel = "story-rwkv7"\n[deploy]\nname = "fish"\n')
    assert main(["deploy", "ray", str(file), "--yaml", "--max-replicas", "4"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert [one["name"] for one in found["applications"]] == ["fish-engines", "fish-front-ends"]
    assert found["applications"][0]["args"]["deploy"] == {"name": "fish", "max_replicas": 4}
    assert Settings.read(found["applications"][0]["args"]).engine.model == "story-rwkv7"


# Secrets


def test_secrets_come_from_the_token() -> None:
    """Red: nodes that derive different secrets, or services that share theirs."""
    found = ServiceSecrets.derive(TOKEN, "fish")
    assert found == ServiceSecrets.derive(TOKEN, "fish")
    assert zmq.curve_public(found.secret_key.encode()).decode() == found.public_key
    texts = [*vars(found).values()]
    others = [
        *vars(ServiceSecrets.derive(TOKEN, "other")).values(),
        *vars(ServiceSecrets.derive(f"{TOKEN}!", "fish")).values(),
    ]
    assert len(set(texts)) == 4 and not set(texts) & set(others)
    assert found.secret_key not in repr(found) and TOKEN not in repr(found)


def test_token_is_found_where_ray_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MachineError, match="no token"):
        cluster_token({})
    make_token()
    assert stat.S_IMODE(default_token_path().stat().st_mode) == 0o600
    assert cluster_token({}) == default_token_path().read_text()
    (tmp_path / "file").write_text(f"{TOKEN}\n")
    assert cluster_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}) == TOKEN
    assert (
        cluster_token({"RAY_AUTH_TOKEN": "that of the variable", "RAY_AUTH_TOKEN_PATH": "nowhere"})
        == "that of the variable"
    )
    with pytest.raises(MachineError, match="fewer"):
        cluster_token({"RAY_AUTH_TOKEN": "short"})


# Finding replicas


def test_changes_of_replicas() -> None:
    assert changes([], [A, B]) == ([A, B], [])
    assert changes([A, B], [B]) == ([], [A])
    assert changes([A], [B]) == ([B], [A])
    assert read_replicas([{**msgspec.to_builtins(B), "models": []}, OSError(), msgspec.to_builtins(A)]) == [A, B]


def test_follower_keeps_the_backend_up_to_date() -> None:
    """Red: a replica that is added twice, or models that are not asked for again."""
    log: list[str] = []

    class Backend:
        def add(self, name: str, client: AsyncClient) -> None:
            log.append(f"+{name} {client.address}")

        async def remove(self, name: str) -> None:
            log.append(f"-{name}")

    async def run() -> None:
        follower = Follower(Backend(), ("public", "secret"), lambda: log.append("changed"))  # type: ignore[arg-type]
        for found in ([A], [A], [A, B], [B]):
            follower.update(found)
            for _ in range(3):
                await asyncio.sleep(0)

    asyncio.run(run())
    assert log == ["+1 tcp://10.0.0.1:1", "changed", "+2 tcp://10.0.0.2:1", "changed", "changed", "-1", "changed"]


def test_front_end_learns_of_replicas_from_its_input() -> None:
    """Red: a front end that does not follow what the actor sends, or that outlives it."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    found = [FoundReplica(name, f"tcp://127.0.0.1:{number}", public) for number, name in ((9, "left"), (19, "right"))]
    config = ServeConfig(host="127.0.0.1", port=0)
    with bind(config) as listener:
        given = FrontConfig(
            own_keys=(public, secret),
            credentials="pass",
            routing_secret="secret",
            serve=dataclasses.asdict(config),
            listener=listener.fileno(),
        )
        child = front_process(lambda: given, listener.fileno(), (sys.executable, "-m", "archerfish.deploy.front"))
        child.start()
        try:
            child.wait()
            process = child.process
            assert process is not None and process.stdin is not None
            for replicas in (found, found[1:]):
                process.stdin.write(msgspec.json.encode(replicas) + b"\n")
                # a front end without a ready replica names those that it knows
                texts = (httpx.get(f"{url_of(listener)}/stats", timeout=30).text for _ in range(1_000))
                assert any([one for one in found if f"{one.name}: " in text] == replicas for text in texts)
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            child.stop()


def test_loads_rank_replicas_where_a_model_has_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: calls through a handle that go to any replica, with a traceback each, where the model's files are not."""
    kinds = {name: type(name, (), {}) for name in ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica")}
    for name, values in (("ray", {}), ("ray.serve", {}), ("ray.serve.request_router", kinds)):
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "archerfish.deploy.ray_router", raising=False)
    router = importlib.import_module("archerfish.deploy.ray_router").CacheAwareRouter()
    del sys.modules["archerfish.deploy.ray_router"]
    card = ModelCard(id="m", kind="generation", max_length=100)

    class NoFiles:
        async def find(self, *_: Any) -> ModelCard:
            return card

        async def text_of(self, _: ModelCard) -> Any:
            raise FileNotFoundError("tokenizer.json")

    router._catalog = NoFiles()
    router._policy = Router(b"secret")
    router._chosen = {}
    for name, num_running in (("1", 9), ("2", 0), ("3", 4)):
        loads = {"m": ReplicaLoad(prompt_token_s=0.01, step_s=0.01 * num_running, num_running=num_running)}
        router._policy.report(router._policy.add(name), loads)
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "123"]
    request = {"prompt": "four and four", "params": {"max_tokens": 4}}
    pending = SimpleNamespace(args=[request], kwargs={}, metadata=SimpleNamespace(internal_request_id="id"))
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    assert [one.replica_id.unique_id for rank in ranks for one in rank] == ["2", "3", "1"]
    assert len(ranks) == 3 and router._chosen["id"].num_tokens == 4


# The command


class Ray:
    """Answers as the dashboard does. `states` are those that the applications go through after a deployment."""

    def __init__(self) -> None:
        self.states, self.puts = ["RUNNING"], list[dict[str, Any]]()
        self.apps: dict[str, Any] = {
            "theirs": {"deployed_app_config": {"name": "theirs"}, "deployments": {}, "message": ""}
        }

    def put(self, body: dict[str, Any]) -> None:
        self.puts.append(body)
        replicas = [{"state": "RUNNING", "node_ip": "10.0.0.7"}]
        parts = {"front-ends": {"replicas": replicas, "message": "Traceback:\n  line 1\nno such model\n"}}
        self.apps = {
            one["name"]: {"deployed_app_config": one, "deployments": parts, "message": ""}
            for one in body["applications"]
        }

    def get(self) -> dict[str, Any]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"applications": {name: {**one, "status": state} for name, one in self.apps.items()}}


@pytest.fixture
def ray() -> Iterator[tuple[Ray, str]]:
    state = Ray()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(state.get)

        def do_PUT(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(lambda: state.put(body))

        def _answer(self, work: Callable[[], Any]) -> None:
            is_known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(work() if is_known else None).replace("null", "{}").encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield state, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_deploying_waits_and_leaves_others_alone(ray: tuple[Ray, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: a deployment that removes other applications, or that is announced before it runs."""
    state, address = ray
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    state.states = ["RUNNING", "RUNNING", "DEPLOYING", "RUNNING"]
    shown: list[str] = []
    said: list[str] = []
    service = settings(deploy={"address": address}, serve={"host": "0.0.0.0", "kinds": "generation"})
    cluster.deploy(service, shown.append, said.append)
    assert [one["name"] for one in state.puts[0]["applications"]] == [
        "theirs",
        "archerfish-engines",
        "archerfish-front-ends",
    ]
    assert "archerfish-engines is deploying (1 running)" in shown[0]
    assert len(said) == 1 and "story-rwkv7 at http://10.0.0.7:8000" in said[0]
    Cluster(address, TOKEN).stop(service, shown.append)
    assert [one["name"] for one in state.puts[1]["applications"]] == ["theirs"]


def test_errors_of_a_deployment(ray: tuple[Ray, str], monkeypatch: pytest.MonkeyPatch) -> None:
    state, address = ray
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    state.states = ["RUNNING", "RUNNING", "DEPLOY_FAILED"]
    with pytest.raises(MachineError, match="could not be deployed: no such model"):
        cluster.deploy(settings(deploy={"address": address}), print, print)
    with pytest.raises(MachineError, match="does not take the token"):
        Cluster(address, "another").applications()
    with pytest.raises(NoClusterError, match="No Ray cluster answers"):
        Cluster("http://127.0.0.1:9", TOKEN).applications()
    with pytest.raises(NoClusterError):  # of another machine: none is started here
        cluster.deploy(settings(deploy={"address": "http://archerfish.invalid:8265"}), print, print)
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(MachineError) as raised:
        cluster.deploy(settings(deploy={"address": "http://127.0.0.1:9"}), print, print)
    assert "archerfish[ray]" in str(raised.value.hint)
