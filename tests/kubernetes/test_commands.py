"""Every command of the chart, the images and docs/kubernetes.md, run as it stands there, with a real server.

What differs from a pod: the port, the address and the directories, which the variables of docs/options.md name.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from archerfish.cli.commands import COMMANDS
from archerfish.config import EngineConfig, HubConfig
from archerfish.serve.tenants import add_key

from .chart import NAME, ROOT, VARIANTS, of_kind, pods, read_images, read_manifests, render, run_helm, runnable, yaml

pytestmark = pytest.mark.cluster
LIMIT_S = 120
IMAGE = read_images()["cpu"]
CHAT = "/v1/completions"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
VALUES = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def environment(directory: Path, port: int, container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container, with a port and directories of this machine."""
    given = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    own = {
        "ARCHERFISH_SERVE_HOST": "127.0.0.1",
        "ARCHERFISH_SERVE_PORT": str(port),
        "XDG_CACHE_HOME": str(directory),
        "TRITON_CACHE_DIR": str(directory / "kernels"),
    }
    here = {
        "ARCHERFISH_CONFIG": directory / "archerfish.toml",
        "ARCHERFISH_SERVE_API_KEYS_FILE": directory / "keys.toml",
    }
    own |= {name: str(path) for name, path in here.items() if name in given}
    return {**os.environ, **IMAGE.env, **given, **own, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}


def run(argv: Sequence[str], env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        runnable(argv), env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Served:
    """A container's process, whose files are in a directory."""

    def __init__(self, argv: Sequence[str], directory: Path, container: dict[str, Any]) -> None:
        self.port = free_port()
        self.env = environment(directory, self.port, container)
        self.process = subprocess.Popen(runnable(argv), env=self.env, cwd=ROOT, start_new_session=True)

    def status(self, path: str, **headers: str) -> int:
        """The status of a new connection's request; 0 where nobody listens."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=LIMIT_S).status_code
        except httpx.ConnectError:
            return 0

    def write(self, key: str, max_tokens: int, *, stream: bool = False) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", CHAT, json.dumps(body), headers)
        return connection.getresponse()


@contextlib.contextmanager
def serving(argv: Sequence[str], directory: Path, container: dict[str, Any], probe: str = "/ready") -> Iterator[Served]:
    served = Served(argv, directory, container)
    pause, deadline = threading.Event(), time.monotonic() + LIMIT_S
    try:
        while served.status(probe) != 200:
            assert served.process.poll() is None and time.monotonic() < deadline
            pause.wait(0.1)
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()  # its children end with it
        served.process.wait()


class Pod:
    """The Deployment's pod of the chart's full variant, its files and keys."""

    def __init__(self, directory: Path) -> None:
        self.manifests = render(VARIANTS["full"])
        self.directory = directory
        self.spec = pods(self.manifests)[0]["spec"]
        [self.container] = self.spec["containers"]
        [config] = [one for one in self.manifests if one["kind"] == "ConfigMap" and one["metadata"]["name"] == NAME]
        (directory / "archerfish.toml").write_text(config["data"]["archerfish.toml"])
        (directory / "archerfish").symlink_to(HubConfig().cache_path())
        self.key = add_key(directory / "keys.toml", "alice", is_operator=True)

    def serving(self) -> contextlib.AbstractContextManager[Served]:
        argv = [*IMAGE.argv("ENTRYPOINT"), *self.container["args"]]
        return serving(argv, self.directory, self.container, self.container["startupProbe"]["httpGet"]["path"])


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    return Pod(tmp_path_factory.mktemp("pod"))


def test_probes_and_metrics_are_those_of_the_service(pod: Pod) -> None:
    """Red: a probe's path that does not exist or needs a key, a metric in a query that /metrics lacks."""
    check = IMAGE.argv("HEALTHCHECK")
    with pod.serving() as served:
        assert [served.status(pod.container[probe]["httpGet"]["path"]) for probe in PROBES] == [200, 200, 200]
        assert run(check, served.env).returncode == 0
        headers = {"Authorization": f"Bearer {pod.key}"}
        client = httpx.Client(base_url=f"http://127.0.0.1:{served.port}", headers=headers, timeout=LIMIT_S)
        assert (
            client.post("/v1/embeddings", json={"input": "a fish"}).status_code
            == served.write(pod.key, 4).status
            == 200
        )
        [endpoint] = of_kind(pod.manifests, "ServiceMonitor")["spec"]["endpoints"]
        assert endpoint["authorization"]["credentials"]["key"] == "key"
        families = text_string_to_metric_families(client.get(endpoint["path"]).text)
        exported = {sample.name for family in families for sample in family.samples}
    assert run(check, served.env).returncode != 0
    queries = [one["metadata"]["query"] for one in of_kind(pod.manifests, "ScaledObject")["spec"]["triggers"]]
    used = [re.findall(r"\barcherfish_\w+", query) for query in queries]
    assert all(used) and {name for names in used for name in names} <= exported
    assert all('{namespace="lab", service="fish"}' in query for query in queries)
    assert all(re.match(r"sum\(|histogram_quantile\(0.95, sum by \(le\)", query) for query in queries)


@pytest.mark.slow
def test_pod_ends_without_a_lost_request(pod: Pod) -> None:
    """The manifest's own times. Red: a port that closes before /ready turns, a stream that is cut off."""
    assert "lifecycle" not in pod.container  # SIGTERM comes at once
    with pod.serving() as served:
        stream = served.write(pod.key, 12_000, stream=True)
        assert stream.readline().startswith(b"data: ")
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        statuses, pause = [], threading.Event()
        with contextlib.suppress(ConnectionError, httpx.TransportError):  # until the port is closed
            while True:
                statuses.append(served.status(pod.container["readinessProbe"]["httpGet"]["path"]))
                assert json.load(served.write(pod.key, 4))["choices"][0]["text"]
                pause.wait(0.2)
        assert time.monotonic() - began >= float(served.env["ARCHERFISH_SERVE_DRAIN_S"])
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert served.process.wait(LIMIT_S) == 0
    assert statuses.count(503) >= 3 and 200 not in statuses[statuses.index(503) :]
    assert time.monotonic() - began < pod.spec["terminationGracePeriodSeconds"]


def test_init_containers_run(pod: Pod) -> None:
    commands = [[*IMAGE.argv("ENTRYPOINT"), *one["args"]] for one in pod.spec["initContainers"]]
    assert [command[1] for command in commands] == ["pull"]
    for command, container in zip(commands, pod.spec["initContainers"], strict=True):
        done = run(command, environment(pod.directory, 1, container))
        assert done.returncode == 0, done.stderr


def test_default_models_are_pulled_and_are_those_of_the_service() -> None:
    spec = pods(render({}))[0]["spec"]
    env = environment(HubConfig().cache_path().parent, 1, spec["initContainers"][0])  # where `make models` has put them
    done = run([*IMAGE.argv("ENTRYPOINT"), *spec["initContainers"][0]["args"]], env)
    assert done.returncode == 0, done.stderr
    assert spec["containers"][0]["args"][1:] == spec["initContainers"][0]["args"][1:]
    assert spec["containers"][0]["args"][1] == EngineConfig.model


# The page


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A directory in which the commands of the page find what they name."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    [values] = VALUES
    (tmp_path / values.split()[1]).write_text(values)
    (tmp_path / "archerfish.toml").write_text('[serve]\nhost = "0.0.0.0"\n')
    (tmp_path / "service.yaml").write_text("applications: []\n")
    return tmp_path


def test_commands_of_the_page_are_of_known_programs() -> None:
    assert {line.split()[0] for line in LINES} == {"docker", "helm", "kubectl", "archerfish"}


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("helm ")])
def test_helm_commands_of_the_page(line: str, shell: Path) -> None:
    from .test_chart import check

    only_of_clusters = {"install", "upgrade", "--install", "--reuse-values"}
    done = run_helm("template", *(word for word in shlex.split(line)[1:] if word not in only_of_clusters), cwd=shell)
    assert done.returncode == 0, done.stderr
    for manifest in read_manifests(done.stdout):
        check(manifest)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("docker build ")])
def test_build_commands_of_the_page(line: str) -> None:
    words = shlex.split(line)[2:]
    options = list(zip(words[:-1:2], words[1:-1:2], strict=True))
    images = read_images()
    known = {name for image in images.values() for name in image.arguments}
    assert words[-1] == "." and (ROOT / dict(options)["--file"]).is_file() and dict(options)["--target"] in images
    assert {text.partition("=")[0] for name, text in options if name == "--build-arg"} <= known
    assert {name for name, _ in options} <= {"--file", "--target", "--tag", "--build-arg"}


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("docker run ")])
def test_run_commands_of_the_page(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    [tag] = [word for word in words if word.startswith("archerfish:")]
    options, arguments = words[2 : words.index(tag)], words[words.index(tag) + 1 :]
    assert f"--tag {tag} ." in PAGE and options[options.index("--publish") + 1].split(":")[1] == IMAGE.words["EXPOSE"]
    assert options[options.index("--volume") + 1].split(":")[1] in json.loads(IMAGE.words["VOLUME"])
    with serving([*IMAGE.argv("ENTRYPOINT"), *arguments], tmp_path, {}) as served:
        assert served.status("/health") == 200


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("archerfish ")])
def test_archerfish_commands_of_the_page(line: str, shell: Path) -> None:
    command, _, file = line.partition(" > ")
    if command.split()[1] not in {one.name.split()[0] for one in COMMANDS}:
        pytest.skip("this archerfish has no such command")
    done = run(shlex.split(command), dict(os.environ), shell)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert not file or "applications" in yaml.safe_load(done.stdout)


def test_kubectl_commands_of_the_page(shell: Path) -> None:
    rollout, label, create = (shlex.split(line) for line in LINES if line.startswith("kubectl "))
    (shell / "keys.toml").touch()
    values = yaml.safe_load((shell / "my-values.yaml").read_text())
    assert create[:5] == ["kubectl", "create", "secret", "generic", values["apiKeys"]["secret"]]
    [container] = pods(render(VARIANTS["full"]))[0]["spec"]["containers"]
    [path] = [one["value"] for one in container["env"] if "KEYS" in one["name"]]
    assert create[5] == f"--from-file={Path(path).name}" and "archerfish keys keys.toml " in PAGE
    assert rollout == ["kubectl", "rollout", "status", "deployment/archerfish"]
    name, _, value = label[-1].partition("=")
    [rule] = of_kind(render({}), "NetworkPolicy")["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {name: value}}}]
    if kubectl := shutil.which("kubectl"):  # without a cluster
        dry = [kubectl, *create[1:], "--dry-run=client", "--output=yaml"]
        done = subprocess.run(dry, cwd=shell, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert done.returncode == 0 and list(yaml.safe_load(done.stdout)["data"]) == ["keys.toml"], done.stderr
