"""`archerfish deploy ray` itself: gives a service to a Ray cluster, as `serve deploy` does, and waits for it.

This process does not join the cluster and does not import ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from archerfish.deploy.secrets import TOKEN, TOKEN_PATH, cluster_token, has_token, make_token
from archerfish.deploy.settings import FRONT_ENDS, Settings, app_names, serve_config
from archerfish.errors import MachineError
from archerfish.serve.processes import is_loopback, stop_on_signals
from archerfish.serve.run import wait_for_signal

PATH = "/api/serve/applications/"
POLL_S = 0.5
ANSWER_S = 60.0  # the first deployment starts Ray Serve
START_S = 120.0
OBJECT_STORE_BYTES = 100_000_000  # nothing of ours is in it
END_S = 60.0  # in addition to the grace time
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class NoClusterError(MachineError):
    """Nothing answers where a Ray cluster was expected."""


class Cluster:
    """A Ray cluster, by the address of its dashboard."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self._token = address.rstrip("/"), token

    def ask(self, method: str = "GET", body: Any = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + PATH, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.loads(answer.read() or b"{}")  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:1000]
            if error.code not in (401, 403):
                raise MachineError(
                    f"The Ray cluster at {self.address} answers with status {error.code}: {text}"
                ) from error
            hint = f"Give the one of the cluster in {TOKEN}, or in the file that {TOKEN_PATH} names."
            raise MachineError(f"The Ray cluster at {self.address} does not take the token.", hint=hint) from error
        except (OSError, ValueError) as error:
            hint = "Start Ray there (docs/ray.md), or give the address of its dashboard: [deploy] address."
            raise NoClusterError(f"No Ray cluster answers at {self.address}: {error}.", hint=hint) from error

    def applications(self) -> dict[str, Any]:
        """The applications that run, with their states."""
        return self.ask().get("applications", {})  # type: ignore[no-any-return]

    def deploy(self, config: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
        """Deploy applications. Others that were deployed in this way stay, but for those named in `without`."""
        names = {*without, *(one["name"] for one in config["applications"])}
        kept = [one["deployed_app_config"] for name, one in self.applications().items() if name not in names]
        self.ask("PUT", {**config, "applications": [*filter(None, kept), *config["applications"]]})

    def wait(self, names: tuple[str, ...], show: Callable[[str], None]) -> dict[str, Any]:
        """Wait until applications run as they were deployed; an error says which one cannot."""
        while True:
            found = {name: one for name, one in self.applications().items() if name in names}
            for name, one in found.items():
                if one["status"] in FAILED:
                    messages = [one["message"], *(part["message"] for part in one["deployments"].values())]
                    reasons = dict.fromkeys(
                        text.strip().splitlines()[-1] for text in messages if text.strip()
                    )  # of tracebacks
                    hint = (
                        f"The logs of Ray say more; `serve status` too. `archerfish deploy ray --stop` removes {name}."
                    )
                    raise MachineError(f"{name} could not be deployed: {' '.join(reasons)}", hint=hint)
            if len(found) == len(names) and all(one["status"] == "RUNNING" for one in found.values()):
                return found
            show(
                ", ".join(f"{name} is {one['status'].lower()}{counts(one)}" for name, one in found.items())
                or "starting"
            )
            time.sleep(POLL_S)

    def stop(self, settings: Settings, show: Callable[[str], None]) -> None:
        """Remove a service and wait until its requests have ended."""
        names = app_names(settings.deploy.name)
        end = time.monotonic() + settings.serve.drain_s + settings.serve.grace_s + END_S
        self.deploy({"applications": []}, without=names)
        while (left := sorted(self.applications().keys() & set(names))) and time.monotonic() < end:
            show(f"{' and '.join(left)} end")
            time.sleep(POLL_S)


def counts(application: dict[str, Any]) -> str:
    """How many replicas of an application are in which state, for people."""
    states = [replica["state"].lower() for part in application["deployments"].values() for replica in part["replicas"]]
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f" ({text})" if text else ""


def urls(settings: Settings, front_ends: dict[str, Any]) -> list[str]:
    """Where the service accepts HTTP: [serve] host, or each node's address if that is a wildcard."""
    serve = settings.serve
    nodes = [one["node_ip"] for one in front_ends["deployments"][FRONT_ENDS]["replicas"] if one["state"] == "RUNNING"]
    hosts = dict.fromkeys(nodes if serve.host in ("", "0.0.0.0", "::") else [serve.host])
    return [f"http://[{host}]:{serve.port}" if ":" in host else f"http://{host}:{serve.port}" for host in hosts]


def deploy(settings: Settings, show: Callable[[str], None], announce: Callable[[str], None]) -> None:
    """Deploy a service and wait until it is ready. Where no cluster runs, one is started here, and this waits for its
    end."""
    settings.check()
    try:
        cluster = Cluster(settings.deploy.address, cluster_token())
        cluster.applications()
    except MachineError as error:
        if not may_start(error, settings.deploy.address):
            raise
        with local_ray(settings, show) as cluster:
            announce(bring_up(cluster, settings, show, "Ctrl+C stops it, and Ray"))
            wait_for_signal()
            announce("Stopping: running requests are finished. Ctrl+C ends it at once.")
            cluster.stop(settings, show)
        return
    announce(bring_up(cluster, settings, show, "`archerfish deploy ray --stop` with the same configuration stops it"))


def may_start(error: MachineError, address: str) -> bool:
    """Whether there is no cluster yet, and it is this machine that was named."""
    return (isinstance(error, NoClusterError) or not has_token()) and is_loopback(urlsplit(address).hostname or "")


def bring_up(cluster: Cluster, settings: Settings, show: Callable[[str], None], how_to_stop: str) -> str:
    cluster.deploy(serve_config(settings))
    names = app_names(settings.deploy.name)
    found = cluster.wait(names, show)
    at = " and ".join(urls(settings, found[names[1]]))
    models = ", ".join((*spec.served_names, spec.model)[0] for spec in settings.specs())
    return f"{settings.deploy.name} serves {models} at {at} ({how_to_stop})."


@contextmanager
def local_ray(settings: Settings, show: Callable[[str], None]) -> Iterator[Cluster]:
    """A Ray cluster of this machine alone, bound to its loopback address. All its processes end with the context."""
    if find_spec("ray") is None:
        raise MachineError(
            "No Ray cluster runs, and ray is not installed.", hint="Run `pip install 'archerfish[ray]'`."
        )
    address = urlsplit(settings.deploy.address)
    if not has_token():
        make_token()
    host = str(address.hostname)
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--port=0",
        f"--node-ip-address={host}",
        f"--dashboard-host={host}",
        f"--dashboard-port={address.port or 8265}",
        "--include-dashboard=true",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]
    with tempfile.TemporaryFile() as log:
        environ = {**os.environ, "RAY_AUTH_MODE": "token", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, process_group=0
        )
        with stop_on_signals(lambda: os.killpg(process.pid, signal.SIGKILL)):
            try:
                show("Starting Ray")
                yield wait_for_ray(process, Cluster(settings.deploy.address, cluster_token()), log)
            finally:
                end_group(process)


def wait_for_ray(process: subprocess.Popen[bytes], cluster: Cluster, log: Any) -> Cluster:
    end = time.monotonic() + START_S
    while True:
        try:
            cluster.applications()
            return cluster
        except NoClusterError:
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
                raise MachineError("Ray could not be started:\n" + "\n".join(lines[-5:])) from None
        time.sleep(POLL_S)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End Ray's processes, which are in one group; some of them do not end at SIGTERM."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
