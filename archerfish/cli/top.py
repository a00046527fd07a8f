"""`archerfish top`: a live view of a running server, from its routes /stats and /metrics (for refusals)."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archerfish.cli.options import Parser
from archerfish.cli.output import Output, make_table, printable, seconds
from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError, ServiceError, UnreachableError

if TYPE_CHECKING:
    from rich.console import Group

TIMEOUT_S = 10.0
WINDOW_S = 60.0  # of hit rates and refusals
REFUSED = re.compile(r"^(?:archerfish_|vllm:)refused_requests_total\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COLUMNS = (
    "model",
    "replica",
    "tokens/s",
    "running",
    "waiting",
    "TTFT p50",
    "p99",
    "gap p50",
    "p99 ",
    "KV use",
    "hit rate",
    "state",
)
Key = tuple[str, str]  # model and replica
Counts = list[tuple[dict[str, str], float]]  # with their labels


def add_top_arguments(parser: Parser) -> None:
    default = "http://127.0.0.1:8000"
    parser.add_argument("url", nargs="?", default=default, metavar="URL", help=f"server (default: {default})")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="X", help="seconds between two frames (default: 1)"
    )
    parser.add_argument(
        "--api-key-env", default="", metavar="VARIABLE", help="environment variable that holds an API key"
    )


def run_top(arguments: Namespace, out: Output) -> int:
    if not 0.1 <= arguments.interval <= 3600:
        raise InvalidOptionError(f"--interval is {arguments.interval:g}; it must be from 0.1 to 3600 seconds.")
    server = Server(arguments.url, api_key(arguments.api_key_env))
    frames = watch(server.snapshot, arguments.interval, time.sleep)
    first = next(frames)
    with ExitStack() as stack:
        show: Callable[[Frame], None] = lambda frame: print_frame(frame, out)  # noqa: E731
        if out.is_rich and not arguments.once:
            from rich.live import Live

            live = stack.enter_context(Live(draw(first), screen=True, auto_refresh=False))
            show = lambda frame: live.update(draw(frame), refresh=True)  # noqa: E731
        with suppress(KeyboardInterrupt):  # how the live view ends
            for frame in frames:
                show(frame)
                if arguments.once:
                    break
    return 0


def api_key(variable: str) -> str:
    if variable and not os.environ.get(variable):
        raise InvalidOptionError(f"--api-key-env names {variable}, which is empty or not set.")
    return os.environ.get(variable, "")


@dataclass(frozen=True)
class Snapshot:
    """What a server reported at one time. engines: figures by model and replica."""

    url: str
    version: str
    at_s: float
    engines: dict[Key, dict[str, Any]]
    replicas: dict[str, str]  # states
    refusals: Counts


class Server:
    """A running server, asked over HTTP."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise InvalidInputError(f"{url} is not an HTTP address.", hint="For example http://127.0.0.1:8000.")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._version = ""

    def snapshot(self) -> Snapshot:
        stats, at_s = self._json("/stats"), time.monotonic()
        self._version = self._version or str(self._json("/version").get("version", ""))
        found: dict[str, Any] = stats.get("replicas") or {"": stats}
        try:
            of_models = {name: one.get("models", {}) for name, one in found.items()}
            engines = {
                (model, name): figures for name, models in of_models.items() for model, figures in models.items()
            }
            if "models" not in stats and "replicas" not in stats:
                raise KeyError("models")
            replicas = {name: str(one.get("state", "ready")) for name, one in found.items() if name}
        except (AttributeError, KeyError) as error:
            raise self._not_ours() from error
        refusals = read_refusals(self._get("/metrics").decode(errors="replace"))
        return Snapshot(self.url, self._version, at_s, engines, replicas, refusals)

    def _not_ours(self) -> InvalidInputError:
        return InvalidInputError(
            f"What answers at {self.url} is not an archerfish server.", hint="Give the address of one."
        )

    def _json(self, path: str) -> dict[str, Any]:
        try:
            found = json.loads(self._get(path))
        except ValueError:
            raise self._not_ours() from None
        if not isinstance(found, dict):
            raise self._not_ours()
        return found

    def _get(self, path: str) -> bytes:
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                told = read_message(error.read())
            if error.code in (401, 403):
                hint = "Put the key into an environment variable and name it: --api-key-env VARIABLE."
                raise InvalidInputError(f"{self.url} refuses {path}: {told or error.reason}", hint=hint) from error
            if error.code in (429, 503) and told:
                raise ServiceError(f"{self.url}: {told}") from error
            raise self._not_ours() from error
        except (http.client.InvalidURL, ValueError) as error:
            raise InvalidInputError(f"{self.url} is not an HTTP address: {error}.") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            hint = "Start one with `archerfish serve`, or give the address of one that runs."
            raise UnreachableError(f"No server answers at {self.url}: {reason}.", hint=hint) from error


def read_message(body: bytes) -> str:
    """The message of an error in OpenAI's shape; empty: it has another shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def read_refusals(text: str) -> Counts:
    """Counts of refused requests in Prometheus' text format."""
    return [
        ({label: re.sub(r"\\(.)", r"\1", given) for label, given in LABEL.findall(labels)}, float(value))
        for labels, value in REFUSED.findall(text)
    ]


# Figures, some of them between two snapshots


@dataclass(frozen=True)
class Frame:
    """What is shown at one time. problem: why the server does not answer now."""

    url: str
    version: str
    rows: list[dict[str, Any]]
    refusals: list[dict[str, Any]]
    problem: str = ""


def watch(snapshot: Callable[[], Snapshot], interval_s: float, sleep: Callable[[float], None]) -> Iterator[Frame]:
    """Frames without end. An error of the first snapshot is raised; later ones are shown, as servers restart."""
    kept = deque([snapshot()])
    yield frame_of(kept)
    while True:
        sleep(interval_s)
        try:
            kept.append(snapshot())
        except ArcherfishError as error:
            last = frame_of(kept)
            yield Frame(last.url, last.version, last.rows, last.refusals, problem=str(error))
            continue
        while len(kept) > 2 and kept[-1].at_s - kept[1].at_s >= WINDOW_S:
            kept.popleft()
        yield frame_of(kept)


def frame_of(kept: deque[Snapshot]) -> Frame:
    last, oldest = kept[-1], kept[0]
    rows = [row_of(key, last, oldest) for key in sorted(last.engines)]
    seen = {name for _, name in last.engines}
    rows += [
        {"model": "", "replica": name, "state": state} for name, state in last.replicas.items() if name not in seen
    ]
    refusals: list[dict[str, Any]] = []
    for labels, count in last.refusals:
        new = count - sum(value for given, value in oldest.refusals if given == labels)
        refusals.append({**labels, "count": count, "last_minute": max(0.0, new)})
    refusals.sort(key=lambda one: (-one["last_minute"], -one["count"]))
    return Frame(last.url, last.version, rows, refusals)


def row_of(key: Key, last: Snapshot, oldest: Snapshot) -> dict[str, Any]:
    """The figures of one model on one replica; None: unknown, or nothing happened."""
    now = last.engines[key]
    row = {
        "model": key[0],
        "replica": key[1],
        "state": last.replicas.get(key[1], "ready"),
        "tokens_per_s": now.get("tokens_per_second"),
        "running": now.get("num_running"),
        "waiting": now.get("num_waiting", now.get("queue_texts")),
        "kv_usage": now.get("kv_usage"),
    }
    for name, stated in (("first_token", "ttft"), ("gap", "inter_token")):
        row |= {f"{name}_p{percent}_s": now.get(f"{stated}_p{percent}_s") for percent in (50, 99)}
    past = oldest.engines.get(key, {})
    hits, misses = grown(now, past, "cache_hits"), grown(now, past, "cache_misses")
    if not hits + misses:  # nothing new: since the start
        hits, misses = now.get("cache_hits", 0), now.get("cache_misses", 0)
    row["hit_rate"] = hits / (hits + misses) if hits + misses else None
    return row


def grown(now: Mapping[str, Any], past: Mapping[str, Any], name: str) -> float:
    """How much a counter grew; one that became smaller began again at 0."""
    value, before = float(now.get(name, 0)), float(past.get(name, 0))
    return value - before if value >= before else value


# On the screen


def cells(row: Mapping[str, Any]) -> list[str]:
    def shown(name: str, form: Callable[[float], str]) -> str:
        return "-" if row.get(name) is None else form(row[name])

    percent, count = "{:.0%}".format, "{:,.0f}".format
    times = [shown(f"{name}_p{number}_s", seconds) for name in ("first_token", "gap") for number in (50, 99)]
    return [
        printable(row["model"]) or "-",
        printable(row["replica"]) or "-",
        shown("tokens_per_s", "{:,.1f}".format),
        shown("running", count),
        shown("waiting", count),
        *times,
        shown("kv_usage", percent),
        shown("hit_rate", percent),
        row["state"],
    ]


def title(frame: Frame) -> str:
    return f"{frame.url}, archerfish {printable(frame.version)}, {time.strftime('%H:%M:%S')}"


def tables(frame: Frame) -> Iterable[tuple[str, tuple[str, ...], list[list[str]]]]:
    rows = [cells(row) for row in frame.rows]
    if len({row["model"] for row in frame.rows}) < len(frame.rows):  # several replicas
        names = ("tokens_per_s", "running", "waiting")
        sums = {name: sum(row.get(name) or 0 for row in frame.rows) for name in names}
        rows.append(cells({"model": "all", "replica": "", "state": "", **sums}))
    shown = [place for place in range(len(COLUMNS)) if place == 0 or any(row[place] != "-" for row in rows)]
    yield title(frame), tuple(COLUMNS[place] for place in shown), [[row[place] for place in shown] for row in rows]
    if frame.refusals:
        lines = [
            [
                printable(one.get("code", "")),
                printable(one.get("model_name", "")),
                one.get("replica", "-"),
                f"{one['last_minute']:,.0f}",
                f"{one['count']:,.0f}",
            ]
            for one in frame.refusals
        ]
        yield "Refusals", ("code", "model", "replica", "last minute", "since start"), lines


def print_frame(frame: Frame, out: Output) -> None:
    if out.as_json:
        out.result(vars(frame))
    for heading, columns, rows in tables(frame):
        out.table(heading, columns, rows, numbers=numbers_of(columns))
    if frame.problem:
        out.note(frame.problem)
    sys.stdout.flush()


def draw(frame: Frame) -> Group:
    from rich.console import Group
    from rich.text import Text

    drawn = [make_table(heading, columns, rows, numbers_of(columns)) for heading, columns, rows in tables(frame)]
    return Group(Text(frame.problem, style="bold red"), *drawn, Text("ctrl-c ends", style="dim"))


def numbers_of(columns: Sequence[str]) -> list[str]:
    return [name for name in columns if name not in ("model", "replica", "state", "code")]
