"""A Ray cluster on one machine: each node is a network namespace, and a bridge in another one connects them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

import archerfish

T = TypeVar("T")
ROOT = Path(archerfish.__file__).parents[1]
HUB = "10.86.0.254"  # where clients are
MEMORY = 80_000_000  # of a node's object store, which nothing of ours uses


def why_not() -> str:
    """Why no cluster can be started here, or nothing."""
    if find_spec("ray") is None:
        return "ray is not installed: `make test-cluster` installs it"
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need root and the command ip"
    name = f"fish{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    command = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
    bridge = subprocess.run(command, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespaces here: {made.stderr}{bridge.stderr}" if made.returncode or bridge.returncode else ""


def wait_for(what: str, look: Callable[[], T | None], seconds: float) -> T:
    """The first result of `look` that is not empty."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, f"no {what} within {seconds:g} s"
        time.sleep(0.3)


class Nodes:
    """Three nodes. Everything that runs in them ends with the context."""

    def __init__(self) -> None:
        self.names = [
            f"fish{os.getpid()}-{number}" for number in range(4)
        ]  # the first is that of the bridge and of clients
        self.addresses = ["", *(f"10.86.0.{number}" for number in (1, 2, 3))]
        self.directory = Path(tempfile.mkdtemp(prefix="af", dir="/tmp"))  # short: Ray makes sockets in it
        self.token = self.directory / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(os.urandom(16).hex())
        self.environ = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.names[0], "link", "add", "br0", "type", "bridge")
            ip("-n", self.names[0], "addr", "add", f"{HUB}/24", "dev", "br0")
            ip("-n", self.names[0], "link", "set", "br0", "up")
            for number in (1, 2, 3):
                port, name = f"port{number}", self.names[number]
                ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.names[0])
                ip("-n", self.names[0], "link", "set", port, "master", "br0", "up")
                ip("-n", name, "addr", "add", f"{self.addresses[number]}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "route", "add", "default", "via", HUB)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def pids(self, number: int) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, number: int) -> None:
        """End all processes of a node at once, as if its machine had lost power."""
        for _ in range(20):  # one that was just starting another
            pids = self.pids(number)
            if not pids:
                return
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, 9)
            time.sleep(0.1)

    def python(self, number: int, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start Python in a namespace."""
        command = ["ip", "netns", "exec", self.names[number], sys.executable, *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        return subprocess.Popen(
            command, env=self.environ, text=True, start_new_session=True, cwd=self.directory, **options
        )

    def run(self, number: int, *arguments: str, seconds: float = 120) -> str:
        """Run Python in a namespace and return what it printed."""
        process = self.python(number, *arguments)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{arguments} took longer than {seconds:g} s:\n{output}") from None
        assert process.returncode == 0, output
        return output

    def start_ray(self) -> None:
        """The head on node 1, and two others."""
        own = ["-m", "ray.scripts.scripts", "start", "--num-cpus=4", "--num-gpus=0", f"--object-store-memory={MEMORY}"]
        head = ["--head", "--port=6379", f"--dashboard-host={self.addresses[1]}", f"--temp-dir={self.directory}/ray"]
        self.run(1, *own, *head, f"--node-ip-address={self.addresses[1]}")
        for number in (2, 3):  # one after another: nodes on one machine name their sockets by what is there
            self.run(number, *own, f"--address={self.addresses[1]}:6379", f"--node-ip-address={self.addresses[number]}")

    def listening(self, number: int, module: str) -> list[str]:
        """The addresses at which processes of a module listen on a node."""
        command = ["ip", "netns", "exec", self.names[number], "ss", "-Hltnp"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in self.running(number, module))]

    def running(self, number: int, module: str) -> list[int]:
        """The processes of a module on a node."""
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in self.pids(number)}
        return [pid for pid, file in commands.items() if file.exists() and module in file.read_text()]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
