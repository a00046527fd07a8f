"""A service in virtual time: what goes in comes out, and cache-aware routing does what it is for."""

from __future__ import annotations

import dataclasses

import pytest

from archerfish.route.router import ReplicaLoad
from archerfish.route.scaling import Autoscaler
from archerfish.simulate.pace import PRESETS, Decodes
from archerfish.simulate.simulation import Failure, Outcome, Setup, Simulation
from archerfish.simulate.traces import Arrival, Workload, one_cache_hit_rate
from tests.cache.invariants import check_cache, owned_blocks

PACE = PRESETS["h200-8b"]
SMALL = dataclasses.replace(PACE, kv_tokens=60_000, start_s=2.0)  # evicts, and starts soon
POLICIES = ["random", "round-robin", "least-loaded", "cache-aware"]


def simulate(trace: list[Arrival], setup: Setup, policy: str = "cache-aware") -> tuple[Simulation, Outcome]:
    """Every request ends exactly once, blocks balance, and Little's law holds."""
    simulation = Simulation(trace, setup, policy)
    outcome = simulation.run()
    assert all(job.end_s >= job.arrival.at_s for job in outcome.jobs)
    assert all(job.is_lost or job.end_s >= job.first_token_s > job.arrival.at_s for job in outcome.jobs)
    for replica in simulation.replicas:
        if replica.is_up:
            assert not replica.scheduler.has_work
            check_cache(replica.cache, owned_blocks(replica.scheduler))
    assert sum(len(handle.unreported) + handle.num_live for one in simulation.replicas for handle in one.handles) == 0
    times = [job.end_s - job.arrival.at_s for job in outcome.jobs]
    arrivals_per_s, mean_s = len(times) / outcome.end_s, sum(times) / len(times)
    assert outcome.mean_live == pytest.approx(arrivals_per_s * mean_s)
    return simulation, outcome


def results(outcome: Outcome) -> list[tuple[float, float, int]]:
    return [(job.first_token_s, job.end_s, job.num_cached) for job in outcome.jobs]


@pytest.mark.parametrize("kv_tokens", [200_000, 20_000])
def test_steps_taken_together_give_the_same_as_one_by_one(kv_tokens: int) -> None:
    """Red: a stretch of decodes goes on after a request arrives, or its blocks are taken at another time."""
    pace, trace = (
        dataclasses.replace(PACE, kv_tokens=kv_tokens),
        Workload(rate=20, seconds=3, output_tokens=60).arrivals(),
    )
    both = [simulate(trace, Setup(pace, 2, batches_steps=batches))[1] for batches in (True, False)]
    for one, other in zip(*map(results, both), strict=True):
        assert one == pytest.approx(other)


def test_decodes_say_which_steps_have_ended_and_begun() -> None:
    decodes = Decodes(PACE, 10.0, num_sequences=4, context=4000, num_steps=100)
    each = PACE.decode_s(4, 4000)
    assert (decodes.num_done(10.0), decodes.num_begun(10.0)) == (0, 1)
    assert (decodes.num_done(10.0 + 1.5 * each), decodes.num_begun(10.0 + 1.5 * each)) == (1, 2)
    assert decodes.num_done(decodes.end_s(100)) == 100
    singly = sum(PACE.decode_s(4, 4000 + 4 * step) for step in range(100))
    assert decodes.end_s(100) == pytest.approx(10.0 + singly)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_results(policy: str) -> None:
    traces = [Workload(rate=20, seconds=2, seed=seed).arrivals() for seed in (1, 1, 2)]
    runs = [simulate(trace, Setup(PACE, 3), policy)[1] for trace in traces]
    assert results(runs[0]) == results(runs[1]) != results(runs[2])


def test_shared_prefixes_are_found_on_four_replicas_as_in_one_cache() -> None:
    """A request begins with one of 40 prompts; a replica has room for a good quarter of them.

    Red: digests do not reach the router, or a miss does not count as taking another prefix's place in a cache.
    """
    pace = dataclasses.replace(PACE, kv_tokens=30_000)
    sizes = {"system_prompts": 40, "system_tokens": 2000, "user_tokens": 20, "output_tokens": 10}
    trace = Workload(rate=60, seconds=10, tenants=1, turns=1, **sizes).arrivals()
    best = one_cache_hit_rate(trace, 4 * pace.kv_tokens)
    first, others = (simulate(trace, Setup(pace, 4), policy)[1].figures() for policy in ("cache-aware", "round-robin"))
    assert first["hit rate"] >= 0.9 * best
    assert 0.2 * best <= others["hit rate"] <= 0.4 * best
    assert first["first token p50"] < 0.5 * others["first token p50"]


def test_throughput_grows_with_replicas() -> None:
    """Red: the router sends too much to one replica. Both services get more than they can do."""
    drawn = Workload(seconds=1, turns=1, system_tokens=500, output_tokens=20)
    traces = {count: dataclasses.replace(drawn, rate=300 * count).arrivals() for count in (1, 4)}
    rates = [simulate(trace, Setup(PACE, count))[1].figures()["requests/s"] for count, trace in traces.items()]
    assert rates[1] >= 0.9 * 4 * rates[0]


def test_long_answers_are_spread() -> None:
    drawn = Workload(rate=12, seconds=30, tenants=2, turns=1, system_tokens=1000, user_tokens=50, output_tokens=1500)
    figures = simulate(drawn.arrivals(), Setup(PACE, 4))[1].figures()
    assert figures["imbalance"] < 1.2


@pytest.mark.parametrize("policy", ["round-robin", "cache-aware"])
def test_a_failure_loses_only_answers_that_had_begun(policy: str) -> None:
    failures = (Failure(3.0, 2, 4.0), Failure(6.0, 1, 3.0))
    trace = Workload(rate=60, seconds=10).arrivals()
    simulation, outcome = simulate(trace, Setup(SMALL, 4, num_routers=2, failures=failures), policy)
    lost, retried = [job for job in outcome.jobs if job.is_lost], [job for job in outcome.jobs if job.num_tries > 1]
    assert lost and retried
    assert all(
        job.first_token_s > 0 and any(0 <= job.end_s - failure.at_s <= 1.01 for failure in failures) for job in lost
    )
    assert all(one.is_up for one in simulation.replicas)


def test_no_replica_is_left() -> None:
    """Requests wait until one is back."""
    trace = Workload(rate=10, seconds=3).arrivals()
    _, outcome = simulate(trace, Setup(PACE, 1, failures=(Failure(1.0, 1, 5.0),)))
    assert min(job.first_token_s for job in outcome.jobs if job.arrival.at_s > 1.0) >= 6.0


def test_replicas_follow_the_load() -> None:
    trace = Workload(rate=30, seconds=12, turns=1).arrivals()
    trace.append(dataclasses.replace(trace[-1], at_s=100.0))
    pace = dataclasses.replace(SMALL, max_num_seqs=16)
    _, outcome = simulate(trace, Setup(pace, 1, scale=(1, 6)))
    counts = [count for _, _, count in outcome.live]
    assert (max(counts) > 2, counts[-1], outcome.figures()["lost"]) == (True, 1, 0)
    assert max(counts) <= 6


def test_autoscaler_goes_up_at_once_and_down_late() -> None:
    scaler = Autoscaler(1, 8, target_use=0.5, down_after_s=10.0)
    idle = ReplicaLoad(0.001, max_running=10)
    busy = dataclasses.replace(idle, num_running=10)
    assert scaler.desired(0.0, [busy, busy]) == 4
    assert scaler.desired(9.0, [idle] * 4) == 4
    assert scaler.desired(11.0, [idle] * 4) == 1
    assert (
        scaler.desired(12.0, [dataclasses.replace(idle, num_waiting=1, waiting_tokens={"": 3000})] * 2) == 4
    )  # at most twice
    assert scaler.desired(12.0, [busy] * 20) == 8
    assert Autoscaler(2, 8).desired(0.0, []) == 2


@pytest.mark.slow
def test_two_thousand_replicas() -> None:
    trace = Workload(rate=3000, seconds=3, tenants=300, turns=1).arrivals()
    rates = {
        policy: simulate(trace, Setup(PACE, 2000), policy)[1].figures() for policy in ("round-robin", "cache-aware")
    }
    assert rates["cache-aware"]["hit rate"] > 2 * rates["round-robin"]["hit rate"]
