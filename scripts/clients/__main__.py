"""Drives a running server through other projects' clients and prints a table: `make test-clients`.

It starts `archerfish serve` with the built-in models on a free port, or takes the server of `--url`. No client needs a
network. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.clients import apis, frameworks
from scripts.clients.checks import CHECKS, Check, Server, SkipError

LIMIT_S = 120  # for one check
START_LIMIT_S = 120
COLORS = {"green": "\033[32m", "red": "\033[31m", "skipped": "\033[33m"}
LOG = Path(sys.prefix) / "server.log"
GROUPS = (apis, frameworks)  # importing them fills CHECKS


class TookTooLongError(BaseException):
    """Not an Exception, so that no client takes it for a reason to try again."""


def stay_quiet_and_offline() -> None:
    """Settings of clients that would otherwise ask a network for prices of models and vocabularies, or send traces."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
    found = importlib.util.find_spec("litellm")
    if found is not None and found.origin is not None:  # it comes with the vocabulary that langchain-openai downloads
        os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(found.origin).parent / "litellm_core_utils" / "tokenizers")


def describe(url: str) -> Server:
    """What the server at `url` says about itself; its first generation model and its first embedding model are used."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        models: list[dict[str, Any]] = json.load(answer)["data"]
    first = {model["kind"]: model for model in reversed(models)}
    missing = {"generation", "embedding"} - set(first)
    if missing:
        raise SystemExit(f"{url} serves no {' and no '.join(sorted(missing))} model; the checks need one of each kind.")
    embedder = first["embedding"]
    return Server(url, first["generation"]["id"], embedder["id"], embedder["dimension"])


@contextmanager
def started(program: str) -> Iterator[str]:
    """The URL of a server of our own with the built-in models, for as long as the block runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with LOG.open("wb") as log:
        process = subprocess.Popen([program, "serve", "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(url, process)
        print(f"The server's words are in {LOG}.\n", flush=True)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise SystemExit(f"{LOG.read_text()}\nThe server ended with exit code {process.returncode}.")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready"):
            return
        time.sleep(0.2)
    raise SystemExit(f"{LOG.read_text()}\nThe server was not ready after {START_LIMIT_S} s.")


def take(check: Check, server: Server, limit_s: float = LIMIT_S) -> tuple[str, str]:
    """Run one check: its result and, if it is not green, the first line of why. What clients print is dropped."""

    def stop(*_: object) -> None:
        raise TookTooLongError(f"not done after {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            check.run(server)
    except SkipError as reason:
        return "skipped", str(reason)
    except (Exception, TookTooLongError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return "red", f"{type(error).__name__}: {lines[0] if lines else at.line}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return "green", ""


def run_all(checks: Sequence[Check], server: Server) -> dict[str, int]:
    """Run the checks one after another, a row of the table for each, and count the results."""
    counts = dict.fromkeys(COLORS, 0)
    client = max(len("client"), *(len(check.client) for check in checks))
    name = max(len("check"), *(len(check.name) for check in checks))
    print(f"{'client':{client}} | {'check':{name}} | {'result':7} | seconds")
    print(f"{'-' * client}-|-{'-' * name}-|---------|--------")
    for check in checks:
        since = time.perf_counter()
        result, why = take(check, server)
        counts[result] += 1
        shown = f"{COLORS[result]}{result:7}\033[0m" if sys.stdout.isatty() else f"{result:7}"
        seconds = time.perf_counter() - since
        print(
            f"{check.client:{client}} | {check.name:{name}} | {shown} | {seconds:7.1f}  {why[:300]}".rstrip(),
            flush=True,
        )
    return counts


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts.clients", description="A server, driven through other projects' clients."
    )
    parser.add_argument("--url", help="a server that runs already, as http://127.0.0.1:8000; without it one is started")
    parser.add_argument("--archerfish", default="archerfish", metavar="PROGRAM", help="the program that starts one")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="clients to run, separated by commas, as in the table"
    )
    options = parser.parse_args(args)
    names = {name.strip() for name in options.only.split(",")} - {""}
    known = list(dict.fromkeys(check.client for check in CHECKS))
    if names - set(known):
        parser.error(f"no check of {', '.join(sorted(names - set(known)))}; there are {', '.join(known)}")
    stay_quiet_and_offline()
    running = contextlib.nullcontext(options.url.rstrip("/")) if options.url else started(options.archerfish)
    with running as url:
        counts = run_all([check for check in CHECKS if not names or check.client in names], describe(url))
    print(f"\n{', '.join(f'{count} {result}' for result, count in counts.items())}")
    return 1 if counts["red"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
