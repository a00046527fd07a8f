"""Processes of a service are killed, stopped and paused while clients stream. `make test-hostile`."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.serve.test_processes import exists

from .target import LIMIT_S, ROLES, Target, rest_of, wait_until_empty

pytestmark = pytest.mark.hostile
FLAGS = [("1", "1"), ("2", "2")]  # front ends and replicas


@pytest.fixture(scope="module", params=FLAGS, ids="-".join)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    front_ends, replicas = request.param
    with Target(tmp_path_factory.mktemp("t"), "--num-front-ends", front_ends, "--replicas", replicas) as made:
        yield made
        made.process.terminate()
        made.check_end(0)


def check_ends(streams: list[socket.socket]) -> None:
    """Every stream ends with an error event and the last chunk."""
    for stream in streams:
        data = rest_of(stream)
        assert b'data: {"error":' in data and data.endswith(b"0\r\n\r\n"), data[-400:]


def test_killed_engines_end_streams_with_an_error(target: Target) -> None:
    streams = [target.stream() for _ in range(6)]
    for pid in target.of_role("engine"):
        os.kill(pid, signal.SIGKILL)
    check_ends(streams)
    target.check()


def test_killed_front_ends_are_replaced_and_others_go_on(target: Target) -> None:
    first, *others = target.of_role("front end")
    streams = [target.stream() for _ in range(6)]
    os.kill(first, signal.SIGKILL)
    assert target.chat() == target.answer  # by another front end, or after a wait in the listening socket
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    assert not any(rest_of(stream).endswith(b"0\r\n\r\n") for stream in streams)  # none looks complete
    target.check()


@pytest.mark.parametrize("role", ROLES)
def test_paused_processes_go_on(target: Target, role: str) -> None:
    stream, pids = target.stream(), target.of_role(role)
    for pid in pids[:1]:
        os.kill(pid, signal.SIGSTOP)
        try:
            if role == "front end" and len(pids) > 1:
                assert target.chat() == target.answer
            threading.Event().wait(2)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert stream.recv(1 << 16)
    stream.close()
    target.check()


@pytest.mark.parametrize("role", ROLES)
def test_stopped_processes_are_replaced(target: Target, role: str) -> None:
    for pid in target.of_role(role):
        os.kill(pid, signal.SIGTERM)
        wait_until_empty(partial(exists, pid))
        target.check()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_the_end_of_the_main_process_ends_all(number: int, code: int, tmp_path: Path) -> None:
    with Target(tmp_path, "--num-front-ends", "2", "--replicas", "2", "--grace-s", "1") as target:
        streams = [target.stream() for _ in range(4)]
        target.process.send_signal(number)
        check_ends(streams)
        assert target.process.wait(LIMIT_S) == code
        wait_until_empty(lambda: [pid for pid in target.pids if exists(pid)])
