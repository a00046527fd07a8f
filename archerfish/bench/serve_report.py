"""From the accounts of requests to figures: percentiles, rates, goodput, Little's law, a timeline."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from archerfish.bench.serve_load import Run
from archerfish.bench.serve_requests import OUTCOMES, Record
from archerfish.bench.stats import Summary, summarize

PERCENTS = (50, 90, 95, 99)
MOST_BUCKETS = 120  # of a timeline
STEADY = 0.1  # how far Little's law may be off in a window that began empty and ended with requests in flight
ENDINGS = {"finished_s": ("ok",), "refused_s": ("refused",), "failed_s": ("error", "timeout", "disconnected")}
SLOPE = ", MB/min"
Figures = dict[str, float]


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good. 0: no limit."""

    ttft_s: float = 0.0
    latency_s: float = 0.0

    def holds(self, record: Record) -> bool:
        if record.outcome != "ok" or record.is_cut or (self.latency_s and record.latency_s > self.latency_s):
            return False
        return not (self.ttft_s and record.first_s - record.intended_s > self.ttft_s)  # nan, of embeddings, is no excess


@dataclass
class Point:
    """All rounds of one load on one server."""

    scenario: str
    server: str
    load: str  # its title, with the part
    concurrency: int = 0
    rate: float = 0.0
    part: str = ""  # of a scenario that puts the same load on a server more than once
    rounds: list[Figures] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)  # by status and code, over all rounds
    timeline: dict[str, list[float]] = field(default_factory=dict)  # of the last round

    def summary(self, key: str) -> Summary | None:
        """The middle of the rounds that have this figure."""
        found = [figures[key] for figures in self.rounds if not math.isnan(figures.get(key, math.nan))]
        return summarize(found) if found else None

    def median(self, key: str) -> float | None:
        found = self.summary(key)
        return found.median if found else None

    def add(self, run: Run, limits: Limits) -> Figures:
        figures = measure(run, limits)
        self.rounds.append(figures)
        self.errors.update(error_counts(run.records))
        self.timeline = timeline(run)
        return figures

    def as_dict(self) -> dict[str, Any]:
        keys = list(dict.fromkeys(key for figures in self.rounds for key in figures))
        summaries = {key: found.as_dict() for key in keys if (found := self.summary(key)) is not None}
        return {
            "scenario": self.scenario, "server": self.server, "load": self.load,
            "concurrency": self.concurrency, "rate": self.rate, "part": self.part, "summary": summaries,
            "rounds": [{key: plain(value) for key, value in figures.items()} for figures in self.rounds],
            "errors": dict(self.errors), "timeline": self.timeline,
        }  # fmt: skip


def plain(value: float | None) -> float | None:
    """A number for JSON, which has no nan."""
    return None if value is None or math.isnan(value) else value


def percentiles(samples: Sequence[float], percents: Sequence[int] = PERCENTS) -> list[float]:
    """For each percent the smallest sample that at least this share does not exceed; nan of nothing."""
    ordered = sorted(samples)
    if not ordered:
        return [math.nan] * len(percents)
    return [ordered[max(0, -(-percent * len(ordered) // 100) - 1)] for percent in percents]


def measure(run: Run, limits: Limits) -> Figures:
    """The figures of one run. Latencies are of all requests that ended well, rates of what ended inside the window."""
    window_s = run.window_s or math.nan
    good = [record for record in run.records if record.outcome == "ok"]
    inside = [record for record in good if record.ended_s <= run.start_s + run.window_s]
    held = sum(limits.holds(record) for record in inside)
    num_tokens = sum(record.num_output_tokens for record in inside)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in inside)
    figures: Figures = {
        **account(run.records),
        "window_s": window_s,
        "requests_s": len(inside) / window_s,
        "tokens_s": num_tokens / window_s,
        "prompt_tokens_s": num_prompt_tokens / window_s,
        "goodput_s": held / window_s,
        "good_share": held / len(inside) if inside else math.nan,
        "prompt_tokens": num_prompt_tokens / len(inside) if inside else math.nan,  # of one request, as the server counts
        "num_resent": float(run.num_resent),
        "num_short": sum(record.num_output_tokens < record.num_wanted_tokens for record in good),  # ended before they were to
    }
    for name, samples in samples_ms(good).items():
        figures |= {f"{name}_p{percent}_ms": value for percent, value in zip(PERCENTS, percentiles(samples), strict=True)}
    figures |= little(run)
    late = [record.sent_s - record.intended_s for record in run.records]
    figures["sent_late_p99_ms"] = percentiles(late, (99,))[0] * 1000  # by a limit on requests in flight, or by the client
    figures["client_lag_p99_ms"] = percentiles(run.lags_s, (99,))[0] * 1000
    return figures | memory(run)


def account(records: Sequence[Record]) -> Figures:
    """How many there were, and how each of them ended."""
    ended = Counter(record.outcome for record in records)
    hinted = sum(record.outcome == "refused" and record.retry_after_s is not None for record in records)
    counts = {f"num_{outcome}": float(ended[outcome]) for outcome in OUTCOMES}
    return {"num_requests": float(len(records)), **counts, "num_refused_with_retry_after": float(hinted)}


def error_counts(records: Sequence[Record]) -> Counter[str]:
    """What did not end well, by status and code."""
    return Counter(
        f"{record.status or '-'} {record.code}".strip() for record in records if record.outcome not in ("ok", "left")
    )


def samples_ms(good: Sequence[Record]) -> dict[str, list[float]]:
    """Milliseconds to the first token, between chunks, per token after the first, and to the end."""
    streamed = [record for record in good if record.chunk_times]
    gaps: list[float] = []
    for record in streamed:
        times = record.chunk_times
        gaps.extend((later - earlier) * 1000 for earlier, later in pairwise(times))
    return {
        "ttft": [record.ttft_s * 1000 for record in streamed],
        "inter_token": gaps,
        "per_token": [
            (record.chunk_times[-1] - record.first_s) * 1000 / (record.num_output_tokens - 1)
            for record in streamed
            if record.num_output_tokens > 1
        ],
        "e2e": [record.latency_s * 1000 for record in good],
    }


def little(run: Run) -> Figures:
    """Mean requests in flight by the driver's counter, and by Little's law from what ended: rate x time in the server.

    They agree in a steady state. Where the second is smaller the server falls behind; where they differ after the last answer
    has come, the accounts are wrong.
    """
    end_s = run.start_s + run.window_s
    if run.window_s <= 0:
        return {"mean_in_flight": math.nan, "little_in_flight": math.nan, "little_ratio": math.nan}
    area, at_s, number = 0.0, run.start_s, 0
    for changed_s, now_number in run.in_flight:
        area += number * (min(changed_s, end_s) - min(at_s, end_s))
        at_s, number = changed_s, now_number
    area += number * (end_s - min(at_s, end_s))
    mean = area / run.window_s
    ended = [record for record in run.records if record.ended_s <= end_s]
    law = sum(record.ended_s - record.sent_s for record in ended) / run.window_s
    return {"mean_in_flight": mean, "little_in_flight": law, "little_ratio": law / mean if mean else math.nan}


def is_steady(figures: Figures) -> bool:
    return abs(figures["little_ratio"] - 1) <= STEADY


def memory(run: Run) -> Figures:
    """Bytes of the server in the first and the last quarter of the samples, how they grew beside the KV, and slopes."""
    values = [value for _, value in run.samples if value > 0]
    if len(values) < 4:
        return {}
    quarter = len(values) // 4
    own = [value - cached for (_, value), cached in zip(run.samples, run.cached, strict=True) if value > 0]
    early, late = (percentiles(part, (50,))[0] for part in (values[:quarter], values[-quarter:]))
    own_early, own_late = (percentiles(part, (50,))[0] for part in (own[:quarter], own[-quarter:]))
    times = [at_s for at_s, _ in run.samples]
    slopes = {f"{name}{SLOPE}": 60e-6 * slope(times, used) for name, used in run.processes.items()}
    return {
        "memory_early_bytes": early, "memory_late_bytes": late, "kv_late_bytes": run.cached[-1],
        "memory_growth": (own_late - own_early) / early, **slopes,
    }  # fmt: skip


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the line nearest to some points by least squares, a unit of time."""
    middle, level = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    return sum((at - middle) * (value - level) for at, value in zip(times, values, strict=True)) / spread if spread else 0.0


def timeline(run: Run) -> dict[str, list[float]]:
    """In equal steps from the start to the last answer: requests in flight, and what ended how, a second."""
    length_s = run.end_s - run.start_s
    if length_s <= 0:
        return {}
    step_s = max(length_s / MOST_BUCKETS, 0.05)
    num_steps = math.ceil(length_s / step_s)
    starts = [index * step_s for index in range(num_steps)]
    changes = [at_s - run.start_s for at_s, _ in run.in_flight]
    found: dict[str, list[float]] = {"at_s": [round(start, 4) for start in starts], "in_flight": []}
    for start in starts:
        before = bisect_right(changes, start)
        found["in_flight"].append(float(run.in_flight[before - 1][1]) if before else 0.0)
    for name, outcomes in ENDINGS.items():
        counts = Counter(
            min(num_steps - 1, int((record.ended_s - run.start_s) / step_s))
            for record in run.records
            if record.outcome in outcomes
        )
        found[name] = [counts[index] / step_s for index in range(num_steps)]
    if run.samples:
        found["memory_at_s"], found["memory_bytes"] = ([sample[part] for sample in run.samples] for part in (0, 1))
    return found


# For people

Row = tuple[str, str, float, int]  # title, key, scale, digits
LATENCIES = (("first token", "ttft"), ("between chunks", "inter_token"), ("end to end", "e2e"))
ENDS = (
    ("refused", "num_refused"), ("… with Retry-After", "num_refused_with_retry_after"), ("errors", "num_error"),
    ("timeouts", "num_timeout"), ("disconnected", "num_disconnected"), ("hung up by us", "num_left"),
    ("shorter than asked", "num_short"), ("sent again, since a kept connection was closed", "num_resent"),
)  # fmt: skip
ROWS: tuple[Row, ...] = (
    ("requests/s", "requests_s", 1, 1),
    ("tokens/s", "tokens_s", 1, 0),
    ("prompt tokens/s", "prompt_tokens_s", 1, 0),
    ("goodput, requests/s", "goodput_s", 1, 1),
    *((f"{title} p{percent}, ms", f"{key}_p{percent}_ms", 1.0, 1) for title, key in LATENCIES for percent in PERCENTS),
    ("a token, ms", "per_token_ms", 1, 3),
    ("engine steps/s", "steps_s", 1, 2),
    ("tokens/s at the reader", "read_tokens_s", 1, 0),
    *((f"late at the reader p{percent}, ms", f"late_p{percent}_ms", 1.0, 1) for percent in (50, 90, 99)),
    ("engine loop, CPU us a token", "loop_us_token", 1, 1),
    ("engine process, CPU us a token", "engine_us_token", 1, 1),
    ("front ends, CPU us a token", "front_us_token", 1, 1),
    ("reader, CPU us a token", "reader_us_token", 1, 1),
    ("cores in use", "all_cores", 1, 2),
    ("step thread without a core, %", "core_wait_share", 100, 1),
    ("tokens in a read", "tokens_read", 1, 2),
    ("in flight, mean", "mean_in_flight", 1, 1),
    ("Little's law / that", "little_ratio", 1, 2),
    ("tokens of a prompt", "prompt_tokens", 1, 0),
    ("ended well", "num_ok", 1, 0),
    *((title, key, 1.0, 0) for title, key in ENDS),
    ("memory, MB", "memory_late_bytes", 1e-6, 0),
    ("… of it KV, MB", "kv_late_bytes", 1e-6, 0),
    ("… growth beside KV, %", "memory_growth", 100, 1),
    ("client late p99, ms", "client_lag_p99_ms", 1, 1),
)  # fmt: skip
HIDDEN_WHEN_ZERO = {"tokens_s", "kv_late_bytes", *(key for _, key in ENDS)}


def cell(summary: Summary | None, scale: float, digits: int) -> str:
    """The median, and the range where there are several rounds."""
    if summary is None:
        return "-"
    median, low, high = (f"{value * scale:,.{digits}f}" for value in (summary.median, summary.low, summary.high))
    return f"{median} ({low}-{high})" if summary.rounds > 1 and low != high else median


def table(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """A column for each point, a row for each figure that any of them has."""
    rows: list[list[str]] = []
    for title, key, scale, digits in ROWS:
        found = [point.summary(key) for point in points]
        if all(one is None or (key in HIDDEN_WHEN_ZERO and one.high == 0) for one in found):
            continue
        rows.append([title, *(cell(one, scale, digits) for one in found)])
    slopes = sorted({key for point in points for figures in point.rounds for key in figures if key.endswith(SLOPE)})
    rows += [[key, *(cell(point.summary(key), 1, 1) for point in points)] for key in slopes]
    codes = sorted({code for point in points for code in point.errors})
    rows += [[code, *(f"{point.errors[code]:,}" for point in points)] for code in codes]
    return ["median (range)", *(point.server for point in points)], rows


def by_load(points: Sequence[Point]) -> Mapping[tuple[str, str], list[Point]]:
    """Points of the same load, side by side."""
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.scenario, point.load), []).append(point)
    return found
