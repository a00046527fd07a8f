"""The table of `make test-clients`, over checks of our own: the real ones need other projects' clients."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from scripts.clients import __main__ as clients
from scripts.clients.checks import CHECKS, Check, Server, SkipError

SERVER = Server("http://127.0.0.1:9", "writer", "vectors", 3)


def passes(server: Server) -> None:
    print("what a client prints")
    assert server.v1.endswith("/v1")


def fails(server: Server) -> None:
    raise ValueError("\n  the first line\nthe second")


def fails_without_words(server: Server) -> None:
    raise AssertionError


def skips(server: Server) -> None:
    raise SkipError("needs node")


def hangs(server: Server) -> None:
    try:
        time.sleep(60)
    except Exception:
        time.sleep(60)  # as a client does that tries again after any error


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("one", "a long name", passes), Check("one", "b", fails), Check("another", "c", skips)]
    assert clients.run_all(checks, SERVER) == {"green": 1, "red": 1, "skipped": 1}
    assert [line.split("|")[0] + line.split("|")[2] for line in capsys.readouterr().out.splitlines()] == [
        "client   result  ",
        "--------" + "---------",
        "one      green   ",
        "one      red     ",
        "another  skipped ",
    ]


def test_a_failure_is_told_in_one_line() -> None:
    assert clients.take(Check("", "", fails), SERVER) == ("red", "ValueError: the first line")
    assert clients.take(Check("", "", fails_without_words), SERVER) == ("red", "AssertionError: raise AssertionError")
    assert clients.take(Check("", "", skips), SERVER) == ("skipped", "needs node")


def test_a_check_that_hangs_is_stopped() -> None:
    since = time.monotonic()
    assert clients.take(Check("", "", hangs), SERVER, limit_s=0.1) == ("red", "TookTooLongError: not done after 0.1 s")
    assert time.monotonic() - since < 30


@pytest.mark.parametrize(("run", "code"), [(passes, 0), (skips, 0), (fails, 1)])
def test_exit_code_over_a_running_server(
    run: object, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                b'{"data": [{"id": "vectors", "kind": "embedding", "dimension": 3}, {"id": "writer", "kind": "generation"},'
                b' {"id": "other", "kind": "generation"}]}'
            )

        def log_message(self, *args: object) -> None:
            pass

    seen: list[Server] = []

    def check(server: Server) -> None:
        seen.append(server)
        assert callable(run)
        run(server)

    monkeypatch.setattr(clients, "CHECKS", [Check("mine", "it", check), Check("other", "it", fails)])
    monkeypatch.setattr(clients, "stay_quiet_and_offline", lambda: None)
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert clients.main(["--url", f"{url}/", "--only", "mine"]) == code
        server.shutdown()
    assert seen == [Server(url, "writer", "vectors", 3)]
    assert f"{int(code == 1)} red" in capsys.readouterr().out


def test_unknown_client_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        clients.main(["--only", "opnai"])
    assert "no check of opnai; there are curl" in capsys.readouterr().err


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({(check.client, check.name) for check in CHECKS}) == len(CHECKS) > 70
