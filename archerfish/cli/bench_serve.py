"""`archerfish bench serve`."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archerfish.cli.bench_report import add_report_arguments, finish
from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.errors import ArcherfishError, InvalidOptionError, MachineError, did_you_mean

if TYPE_CHECKING:
    from archerfish.bench.serve_bench import BenchOptions, Found, Tell
    from archerfish.bench.serve_load import Load
    from archerfish.bench.serve_server import ServerOptions

NAMES = ("chat8", "embed", "table", "overload", "overload-embed", "disconnect", "overhead", "frontends")
OURS, OUR_URL = "archerfish", "http://127.0.0.1:8000"
DEFAULT_WORKLOAD, DEFAULT_CONCURRENCY, DEFAULT_COUNT = "chat:64/16", "8", 200


def add_arguments(parser: Parser) -> None:
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(NAMES)} (default: a load by flags)")
    many: dict[str, Any] = {"action": "append", "default": []}
    servers = parser.add_argument_group("servers, side by side")
    servers.add_argument("--server", **many, metavar="NAME=URL", help=f"may be repeated (default: {OURS}={OUR_URL})")
    servers.add_argument("--start", **many, metavar="NAME=COMMAND", help="start a server before and stop it afterwards")
    servers.add_argument("--pid", **many, metavar="NAME=PID", help="process of a running server, to watch its memory")
    servers.add_argument("--model", **many, metavar="[NAME=]MODEL", help="model that generates (default: the first)")
    servers.add_argument("--embedding-model", **many, metavar="[NAME=]MODEL", help="model that embeds (default: the first)")
    servers.add_argument("--api-key-env", **many, metavar="[NAME=]VARIABLE", help="environment variable that holds an API key")
    servers.add_argument("--body", default="", metavar="JSON", help="more members of every request that generates")
    load = parser.add_argument_group("the load, where no scenario is named")
    load.add_argument("--workload", **many, metavar="KIND:IN/OUT", help=(
        "chat:64/16, completions:32-512/16-128, ids:64/16 (token ids) or embeddings:32x4; repeated, with @WEIGHT, a mix "
        f"(default: {DEFAULT_WORKLOAD})"))  # fmt: skip
    load.add_argument("--concurrency", default="", metavar="A,B", help="closed loop: requests at once (default: 8)")
    load.add_argument("--rate", default="", metavar="A,B", help="open loop: Poisson arrivals a second")
    load.add_argument("--max-in-flight", type=int, default=0, metavar="N", help="most requests sent at once in an open loop")
    size = parser.add_argument_group("how much, also of scenarios")
    size.add_argument("--requests", type=int, default=0, metavar="N", help="requests of a measurement (default: 200)")
    size.add_argument("--duration", type=float, default=0.0, metavar="S", help="seconds of a measurement, instead of a number")
    size.add_argument(
        "--warmup", type=int, default=-1, metavar="N", help="requests before, left out (default: 2 for each at once)"
    )
    size.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of every measurement (default: 3)")
    size.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds a request may take (default: 120)")
    size.add_argument("--ttft-target", type=float, default=0.0, metavar="MS", help="first token within, to count as goodput")
    size.add_argument("--e2e-target", type=float, default=0.0, metavar="MS", help="whole answer within, to count as goodput")
    size.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (default: 0)")
    add_report_arguments(parser)
    parser.add_argument("--html", default="", metavar="FILE", help="write plots and tables to FILE, which needs nothing else")


def run(arguments: Namespace, out: Output) -> int:
    try:
        from archerfish.bench import serve
        from archerfish.bench.report import machine
    except ModuleNotFoundError as error:
        hint = "Run `pip install 'archerfish[serve]'`."
        raise MachineError(f"The load generator needs the package {error.name}, which is not installed.", hint=hint) from error

    servers, options = read_servers(arguments), read_options(arguments)
    scenarios, loads = read_work(arguments)
    with out.progress("Measuring") as progress:
        found = serve.measure_servers(servers, options, scenarios, loads, teller(out), progress)
    on = machine()
    heading = f"The client on {on['cpu']}, {on['cores']} cores, {on['date']}"
    if arguments.html:
        from archerfish.bench.serve_plots import page
        from archerfish.cli.texts import write_atomically

        text = page(found, heading).encode()
        write_atomically(Path(arguments.html), lambda file: (file.write(text), None)[1])
    asked = {key: value for key, value in vars(arguments).items() if key not in ("json", "quiet", "debug", "config")}
    if not out.as_json:
        out.line(heading, "bold")
        show(found, out)
    code = finish({"bench": "serve", "machine": on, "asked": asked, **found.as_dict()}, arguments, out)
    return ArcherfishError.exit_code if found.errors else code


def read_servers(arguments: Namespace) -> list[ServerOptions]:
    from archerfish.bench.serve_http import Address
    from archerfish.bench.serve_server import ServerOptions

    named = named_values("--server", arguments.server or [f"{OURS}={OUR_URL}"], ())
    names = list(named)
    start, pids = named_values("--start", arguments.start, names), named_values("--pid", arguments.pid, names)
    models = named_values("--model", arguments.model, names)
    embedding_models = named_values("--embedding-model", arguments.embedding_model, names)
    keys = named_values("--api-key-env", arguments.api_key_env, names)
    body = read_body(arguments.body)
    found = []
    for name, url in named.items():
        Address.parse(url)  # a wrong one is told before anything is started
        found.append(ServerOptions(
            name, url, start.get(name, ""), whole_number("--pid", pids.get(name, "0")), models.get(name, ""),
            embedding_models.get(name, ""), read_key(keys.get(name, "")), body,
        ))  # fmt: skip
    return found


def named_values(flag: str, given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE for each server; a value without a name is for all of them."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if names and (not separator or name not in names):
            if flag in ("--start", "--pid") and len(names) > 1:
                hint = f"{did_you_mean(name, names)} Write {flag} NAME={text if not separator else value}."
                raise InvalidOptionError(f"{flag} {text!r} does not begin with the name of a server.", hint=hint.strip())
            found |= {one: text for one in names if one not in found}
            continue
        if not separator or not name or not value:
            raise InvalidOptionError(f"{flag} is NAME=VALUE, not {text!r}.", hint=f"For example {flag} {OURS}={OUR_URL}.")
        if not names and name in found:
            raise InvalidOptionError(f"{flag} names {name!r} twice.")
        found[name] = value
    return found


def read_key(variable: str) -> str:
    if variable and variable not in os.environ:
        raise InvalidOptionError(f"The environment has no {variable}, which --api-key-env names.")
    return os.environ[variable] if variable else ""


def read_body(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise InvalidOptionError(f"--body is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise InvalidOptionError("--body must be a JSON object.", hint="""For example --body '{"top_p": 0.9}'.""")
    return found


def read_options(arguments: Namespace) -> BenchOptions:
    from archerfish.bench.serve_bench import BenchOptions
    from archerfish.bench.serve_report import Limits

    if arguments.rounds < 1 or arguments.timeout <= 0:
        raise InvalidOptionError("--rounds must be at least 1, and --timeout above 0.")
    for flag in ("requests", "duration", "max_in_flight", "ttft_target", "e2e_target"):
        if getattr(arguments, flag) < 0:
            raise InvalidOptionError(f"--{flag.replace('_', '-')} must not be negative.")
    if arguments.requests and arguments.duration:
        raise InvalidOptionError("--requests and --duration are two ways to say how much: give one of them.")
    return BenchOptions(
        rounds=arguments.rounds, count=arguments.requests, duration_s=arguments.duration, num_warmup=arguments.warmup,
        timeout_s=arguments.timeout, max_in_flight=arguments.max_in_flight, seed=arguments.seed,
        model=next((name for name in arguments.model if "=" not in name), ""),
        limits=Limits(arguments.ttft_target / 1000, arguments.e2e_target / 1000),
    )  # fmt: skip


def read_work(arguments: Namespace) -> tuple[list[str], list[Load]]:
    """The scenarios, or the loads that flags describe."""
    from archerfish.bench.serve_load import Load
    from archerfish.bench.serve_requests import Shape

    flags = [f"--{flag}" for flag in ("workload", "concurrency", "rate") if getattr(arguments, flag)]
    for name in arguments.scenarios:
        if name not in NAMES:
            raise InvalidOptionError(f"There is no scenario {name!r}.", hint=did_you_mean(name, NAMES))
    if arguments.scenarios:
        if flags:
            raise InvalidOptionError(f"{flags[0]} is for a load without a scenario; {arguments.scenarios[0]} has its own.")
        return list(dict.fromkeys(arguments.scenarios)), []
    shapes = tuple(Shape.parse(text) for text in arguments.workload or [DEFAULT_WORKLOAD])
    loads = []
    sizes = numbers("--concurrency", arguments.concurrency or ("" if arguments.rate else DEFAULT_CONCURRENCY))
    for concurrency, rate in [*((size, 0.0) for size in sizes), *((0.0, rate) for rate in numbers("--rate", arguments.rate))]:
        if concurrency != int(concurrency):
            raise InvalidOptionError(f"--concurrency takes whole numbers, not {concurrency:g}.")
        loads.append(Load(
            shapes, concurrency=int(concurrency), rate=rate, duration_s=arguments.duration,
            max_in_flight=arguments.max_in_flight, timeout_s=arguments.timeout,
            count=arguments.requests or (0 if arguments.duration else DEFAULT_COUNT),
            num_warmup=arguments.warmup if arguments.warmup >= 0 else 2 * (int(concurrency) or 8),
        ))  # fmt: skip
    return [], loads


def numbers(flag: str, text: str) -> list[float]:
    """Positive numbers with commas between."""
    try:
        found = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = [0.0]
    if not all(0 < value < float("inf") for value in found):
        raise InvalidOptionError(f"{flag} takes numbers above 0 with commas between, not {text!r}.")
    return found


def whole_number(flag: str, text: str) -> int:
    if not text.isdecimal():
        raise InvalidOptionError(f"{flag} takes a number, not {text!r}.")
    return int(text)


def teller(out: Output) -> Tell:
    """Notes every measurement where no progress bar shows that something is going on."""
    from archerfish.bench.serve_bench import tell_nothing

    return tell_nothing if out.is_rich or out.quiet else lambda name, value: out.note(f"{name}: {value:,.4g}")


def show(found: Found, out: Output) -> None:
    """Figures of each load, servers beside each other; then targets and remarks."""
    from archerfish.bench.serve_report import by_load, table
    from archerfish.bench.targets import row_of

    for (scenario, load), points in by_load(found.points).items():
        columns, rows = table(points)
        out.line()
        out.table(f"{scenario}: {load}", columns, rows, numbers=columns[1:])
    if found.targets:
        cells = [(scenario, server, *row_of(judged)) for scenario, server, judged in found.targets]
        out.line()
        out.table("Targets", ("scenario", "server", "target", "measured", "wanted", ""), cells, numbers=("measured",))
    for note in found.notes:
        out.note(note)
    for server, error in found.errors.items():
        out.line(f"{server}: not measured. {error}")
