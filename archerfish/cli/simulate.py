"""`archerfish simulate`: a service of many replicas in virtual time, under each routing policy."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path

from archerfish.bench.table import Flag
from archerfish.bench.worker import chosen
from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.errors import InvalidInputError, InvalidOptionError
from archerfish.store.files import replace_file, write_errors

POLICY_NAMES = ("random", "round-robin", "least-loaded", "cache-aware")
FLAGS = (
    Flag("--replicas", "replicas at the start (default: 8)", 8),
    Flag(
        "--policy",
        "all, or routing policies: random, round-robin, least-loaded, cache-aware (default: all)",
        "all",
        "A,B",
    ),
    Flag("--preset", "what a replica is (default: h200-8b)", "h200-8b", choices=("h200-8b", "h200-0.6b", "cpu-135m")),
    Flag("--kv-tokens", "tokens whose KV a replica holds (default: of the preset)", 0, minimum=0),
    Flag("--trace", "requests from FILE, one JSON object a line (default: drawn at random)", metavar="FILE"),
    Flag("--rate", "requests a second (default: 50)", 50.0, minimum=0.001),
    Flag("--seconds", "in which requests come (default: 60)", 60.0, minimum=0.001),
    Flag("--tenants", "tenants, of which the first is the most popular (default: 8)", 8),
    Flag("--system-prompts", "system prompts of each tenant (default: 1)", 1),
    Flag("--system-tokens", "mean length of a system prompt (default: 1000)", 1000),
    Flag("--user-tokens", "mean length of what a user says (default: 200)", 200),
    Flag("--output-tokens", "mean length of an answer (default: 200)", 200),
    Flag("--turns", "mean number of turns of a conversation (default: 3)", 3.0),
    Flag("--burst", "requests come in so small a part of the time: 4 means a quarter of each 10 s (default: 1)", 1.0),
    Flag("--seed", "of what is drawn (default: 0)", 0, minimum=0),
    Flag("--routers", "front ends, each with what replicas report and what it has sent itself (default: 1)", 1),
    Flag("--report", "seconds between two reports of a replica (default: 0.2)", 0.2, minimum=0.01),
    Flag(
        "--fail",
        "COUNT replicas are lost after AT seconds, and start again DOWN seconds later; may be repeated",
        [],
        "AT:COUNT:DOWN",
    ),
    Flag("--scale", "the number of replicas follows the load, from LEAST to MOST", metavar="LEAST:MOST"),
    Flag("--plot", "draw the result into FILE (SVG)", metavar="FILE"),
)
SHOWN = {
    "policy": "",
    "req/s": "requests/s",
    "tokens/s": "tokens/s",
    "first token p50": "first token p50",
    "p90": "first token p90",
    "p99": "first token p99",
    "latency p50": "latency p50",
    "p99 ": "latency p99",
    "hit rate": "hit rate",
    "imbalance": "imbalance",
    "lost": "lost",
    "retried": "retried",
    "replica hours": "replica hours",
    "router, us": "router us",
}


def add_simulate_arguments(parser: Parser) -> None:
    for flag in FLAGS:
        flag.add_to(parser)


def run_simulate(arguments: Namespace, out: Output) -> int:
    from archerfish.simulate.pace import PRESETS
    from archerfish.simulate.plot import draw
    from archerfish.simulate.simulation import Failure, Setup, Simulation
    from archerfish.simulate.traces import Workload, one_cache_hit_rate, read_trace

    if arguments.plot and not Path(arguments.plot).absolute().parent.is_dir():
        raise InvalidOptionError(
            f"--plot is {arguments.plot!r}, in a directory that does not exist.", hint="Make it first."
        )
    names = chosen("--policy", "" if arguments.policy == "all" else arguments.policy, POLICY_NAMES)
    pace = PRESETS[arguments.preset]
    if arguments.kv_tokens:
        pace = replace(pace, kv_tokens=arguments.kv_tokens)
    failures = tuple(
        Failure(at_s, int(count), down_s)
        for at_s, count, down_s in (read_numbers("--fail", text, 3) for text in arguments.fail)
    )
    for failure in failures:
        if not 1 <= failure.count <= arguments.replicas:
            message = f"--fail asks to lose {failure.count} of {arguments.replicas} replicas."
            raise InvalidOptionError(message, hint=f"For example --fail {EXAMPLES['--fail']}.")
    least, most = read_numbers("--scale", arguments.scale, 2) if arguments.scale else (0.0, 0.0)
    setup = Setup(
        pace,
        arguments.replicas,
        arguments.routers,
        arguments.report,
        failures=failures,
        scale=(int(least), int(most)),
        seed=arguments.seed,
    )
    drawn = Workload(
        **{spec.name: getattr(arguments, spec.name) for spec in fields(Workload) if hasattr(arguments, spec.name)}
    )
    trace = read_trace(Path(arguments.trace)) if arguments.trace else drawn.arrivals()
    if not trace:
        raise InvalidInputError("No request comes.", hint="Raise --rate or --seconds.")
    longest = max(arrival.num_prompt + arrival.output_tokens for arrival in trace)
    room = min(pace.max_model_len, pace.kv_tokens - pace.kv_tokens % 256)
    if longest > room:
        hint = "Give it more memory (--kv-tokens), or choose another --preset."
        raise InvalidInputError(f"A request has {longest:,} tokens; a replica holds {room:,}.", hint=hint)
    best = one_cache_hit_rate(trace, arguments.replicas * pace.kv_tokens)
    with out.progress("Simulating") as progress:
        outcomes = [Simulation(trace, setup, name).run(progress) for name in names]
    found = {outcome.policy: outcome.figures() for outcome in outcomes}
    title = f"{len(trace):,} requests to {arguments.replicas:,} x {arguments.preset}"
    if arguments.plot:
        with write_errors(Path(arguments.plot)):
            replace_file(Path(arguments.plot), draw(outcomes, title).encode())
    if out.as_json:
        out.result(
            {
                "requests": len(trace),
                "replicas": arguments.replicas,
                "preset": arguments.preset,
                "best hit rate": best,
                "policies": found,
            }
        )
        return 0
    rows = [
        [name, *(show_figure(key, figures[key]) for key in list(SHOWN.values())[1:])] for name, figures in found.items()
    ]
    out.table(f"{title}; times in seconds", list(SHOWN), rows, numbers=list(SHOWN)[1:])
    seconds = ", ".join(f"{outcome.real_s:.1f}" for outcome in outcomes)
    out.line(f"One cache as large as all together would give a hit rate of {best:.3f}. Simulated in {seconds} s.")
    return 0


def read_numbers(option: str, text: str, count: int) -> list[float]:
    """Numbers with colons between them."""
    form = next(flag.metavar for flag in FLAGS if flag.name == option)
    try:
        numbers = [float(word) for word in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers):
        raise InvalidOptionError(
            f"{option} is {text!r}; it must be {form}.", hint=f"For example {option} {EXAMPLES[option]}."
        )
    if option == "--scale" and not 1 <= numbers[0] <= numbers[1]:
        raise InvalidOptionError(f"{option} is {text!r}; LEAST must be at least 1 and not above MOST.")
    return numbers


EXAMPLES = {"--fail": "30:1:20", "--scale": "2:16"}


def show_figure(name: str, value: float) -> str:
    if name in ("lost", "retried"):
        return f"{value:.0f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if name != "hit rate" else f"{value:.3f}"
