"""The service on a Ray cluster of three nodes: `make test-cluster`. The tests of this file are one story, in this
order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from archerfish.deploy.secrets import ServiceSecrets
from tests.deploy.nodes import ROOT, Nodes, wait_for, why_not

pytestmark = pytest.mark.cluster
CONFIG = """
[serve]
host = "0.0.0.0"
kinds = "generation"
[engine]
model = "story-rwkv7"
num_threads = 1
max_num_seqs = {places}
[deploy]
address = "http://10.86.0.1:8265"
min_replicas = {least}
max_replicas = 3
cpus = 2
target_wait_s = 0.2
upscale_delay_s = 1
downscale_delay_s = 4
"""
PEEK = """
import zmq
peer = zmq.Context().socket(zmq.DEALER)
peer.connect("{address}")
peer.send_multipart([b"", b'{{"type":"ping","request_id":"1"}}'])
print(bool(peer.poll(2000)))
peer.close(0)
"""
URLS = [f"http://10.86.0.{number}:8000" for number in (1, 2, 3)]
LOAD = str(ROOT / "tests/deploy/load.py")
LONG_S = 90.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Nodes() as found:
        found.start_ray()
        yield found


def configure(nodes: Nodes, *, places: int, least: int) -> str:
    path = nodes.directory / "service.toml"
    path.write_text(CONFIG.format(places=places, least=least))
    return str(path)


def archerfish(nodes: Nodes, *arguments: str) -> str:
    return nodes.run(0, "-m", "archerfish", "deploy", "ray", *arguments)


def fetch(nodes: Nodes, url: str) -> Any:
    """What a front end answers; None if it does not."""
    done = subprocess.run(
        ["ip", "netns", "exec", nodes.names[0], "curl", "-sf", "-m", "20", url],
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else None


def ready(nodes: Nodes, number: int, url: str = URLS[0]) -> list[str]:
    """The names of the replicas that a front end knows, if these are so many and all of them are ready."""
    found = (fetch(nodes, f"{url}/stats") or {"replicas": {}})["replicas"]
    names = sorted(name for name, replica in found.items() if replica["state"] == "ready")
    return names if len(names) == len(found) == number else []


def read(output: str) -> dict[str, Any]:
    """The JSON line of a program that also logs."""
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


@contextmanager
def under_load(nodes: Nodes, workers: int) -> Iterator[dict[str, Any]]:
    """Clients of the first front end. Afterwards, what became of their requests."""
    stop = nodes.directory / "stop"
    stop.unlink(missing_ok=True)
    process, result = nodes.python(0, LOAD, "load", URLS[0], str(workers), str(stop)), dict[str, Any]()
    try:
        yield result
    finally:
        stop.touch()
        output, _ = process.communicate(timeout=120)
        result.update(read(output))


def test_yaml_that_serve_deploy_takes(nodes: Nodes) -> None:
    """Red: another application in the YAML than the command deploys, which would then replace it."""
    config = configure(nodes, places=2, least=1)
    yaml = nodes.directory / "service.yaml"
    yaml.write_text(archerfish(nodes, config, "--yaml"))
    nodes.run(1, "-m", "ray.serve.scripts", "deploy", str(yaml), "-a", "http://10.86.0.1:8265")
    assert URLS[0] in archerfish(nodes, config)  # waits until it is ready
    first = wait_for("replica", lambda: ready(nodes, 1), LONG_S)
    for url in URLS:
        assert wait_for(f"front end at {url}", lambda url=url: ready(nodes, 1, url), LONG_S) == first  # type: ignore[misc]


def test_only_who_may_reaches_it(nodes: Nodes) -> None:
    """Red: an engine process at other addresses than its node's, or without keys; a cluster that works without its
    token."""
    addresses = [address for number in (1, 2, 3) for address in nodes.listening(number, "archerfish.serve.host")]
    assert len(addresses) == 1 and addresses[0].rpartition(":")[0] in nodes.addresses
    assert "True" not in nodes.run(0, "-c", PEEK.format(address=f"tcp://{addresses[0]}"))
    nodes.environ["RAY_AUTH_TOKEN"] = "another token, which is not that of the cluster"
    try:
        with pytest.raises(AssertionError, match="does not take the token"):
            archerfish(nodes, str(nodes.directory / "service.toml"))
    finally:
        del nodes.environ["RAY_AUTH_TOKEN"]


def test_scales_with_load(nodes: Nodes) -> None:
    """Red: an autoscaling policy that sees only Ray's requests, of which there are none."""
    with under_load(nodes, 16) as result:
        wait_for("third replica", lambda: ready(nodes, 3), LONG_S)
    assert result["answered"] > 0 and not result["failed"]
    wait_for("single replica", lambda: ready(nodes, 1), LONG_S)


def test_rolling_update_loses_nothing(nodes: Nodes) -> None:
    """Red: a replica that ends before another serves, or before its requests have ended."""
    before = ready(nodes, 1)
    with under_load(nodes, 4) as result:
        archerfish(nodes, configure(nodes, places=4, least=3))
        names = wait_for("new replicas", lambda: ready(nodes, 3), LONG_S)
    assert result["answered"] > 0 and not result["failed"]
    assert not set(before) & set(names)


def test_requests_go_where_their_prefix_is_cached(nodes: Nodes) -> None:
    """Red: replicas in turn, of which a third has a prompt; a router of Ray that knows no caches."""
    for arguments in (("prompts", "4", *URLS), ("handle", "3")):
        cached = read(nodes.run(1, LOAD, *arguments))["cached"]
        assert sum(number >= 64 for number in cached) >= 0.9 * len(cached)


def test_engine_process_killed(nodes: Nodes) -> None:
    """Red: requests that are lost with an engine process, or a replica that Ray replaces while it starts another."""
    before = ready(nodes, 3)
    killed = next(pid for number in (1, 2, 3) for pid in nodes.running(number, "archerfish.serve.host"))
    with under_load(nodes, 4) as result:
        os.kill(killed, signal.SIGKILL)
        wait_for("loss", lambda: not ready(nodes, 3), LONG_S)
        assert wait_for("other engine process", lambda: ready(nodes, 3), LONG_S) == before
    assert result["answered"] > 0 and not result["failed"]


def test_node_killed(nodes: Nodes) -> None:
    """Red: a replica of a dead node that still gets requests, or that Ray does not replace."""
    before = ready(nodes, 3)
    with under_load(nodes, 4) as result:
        nodes.kill(3)
        names = wait_for("other replica", lambda: [one for one in [ready(nodes, 3)] if one and one != before], LONG_S)[
            0
        ]
    assert result["answered"] > 0 and not result["failed"]
    assert set(before) & set(names)  # the others went on


def test_stop_and_what_the_logs_say(nodes: Nodes) -> None:
    """Red: a service that goes on after `--stop`; a secret in a log, or in what Ray keeps of a deployment."""
    token = nodes.token.read_text()
    secrets = [token, *vars(ServiceSecrets.derive(token, "archerfish")).values()]
    kept = nodes.run(1, "-m", "ray.serve.scripts", "config", "-a", "http://10.86.0.1:8265")
    assert "story-rwkv7" in kept
    archerfish(nodes, str(nodes.directory / "service.toml"), "--stop")
    assert fetch(nodes, f"{URLS[0]}/ready") is None
    files = (nodes.directory / "ray").glob("session_2*/logs/**/*")
    logs = [path.read_text(errors="replace") for path in files if path.is_file()]
    assert len(logs) > 10
    assert not [secret for secret in secrets if any(secret in text for text in [kept, *logs])]
