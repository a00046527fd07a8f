from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archerfish.errors import InvalidOptionError
from archerfish.params import SamplingParams
from archerfish.sched import policy as policies
from archerfish.sched.drafts import Speculation
from archerfish.sched.plan import Plan
from archerfish.sched.policy import FairShare, LongestPrefixFirst, SchedulingPolicy, scheduling_policy
from archerfish.sequence import Namespace, Request
from archerfish.sequence import Sequence as Stream
from archerfish.step import StepResult
from tests.calls import spy_on
from tests.sched.worlds import OracleDrafter, World


def request(name: str, *, tenant: str = "", arrival: float = 0.0) -> Request:
    return Request(name, [1, 2], SamplingParams(), 4, namespace=Namespace(tenant), arrival=arrival)


@pytest.mark.parametrize(
    ("policy", "field", "values", "order"),
    [
        ("fcfs", "priority", (0, 2, 1), "012"),
        ("priority", "priority", (0, 2, 1, 2), "1320"),
        ("deadline", "deadline", (None, 900.0, 500.0), "210"),
    ],
)
def test_requests_run_in_the_order_of_the_policy(policy: str, field: str, values: tuple[Any, ...], order: str) -> None:
    world = World(policy=policy, max_num_seqs=1)
    for value in values:
        world.add(5, **{field: value})
    world.run()
    assert world.order_of_ends == [f"r{number}" for number in order]


def test_a_registered_policy_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(SchedulingPolicy):
        pass

    monkeypatch.setattr(policies, "_POLICIES", dict(policies._POLICIES))
    policies.register_scheduling_policy("mine", Mine)
    assert isinstance(scheduling_policy("mine"), Mine)
    with pytest.raises(InvalidOptionError, match="already"):
        policies.register_scheduling_policy("fcfs", Mine)
    with pytest.raises(InvalidOptionError, match="subclass"):
        policies.register_scheduling_policy("other", int)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="fair-share"):
        scheduling_policy("fairshare")


def test_longest_prefix_runs_what_is_cached_first() -> None:
    world = World(policy="longest-prefix-first", max_num_seqs=1)
    world.add(list(range(1, 17)))
    world.run()
    world.add(12)
    world.add([*range(1, 9), 50, 51])
    world.add([*range(1, 17), 50, 51])
    before = world.cache.stats()
    world.step()
    assert world.cache.stats().request_misses == before.request_misses, "asking must not count as a request"
    world.run()
    assert world.order_of_ends == ["r0", "r3", "r2", "r1"]


def test_longest_prefix_first_bounds_lookups_and_starves_none() -> None:
    looked_up: list[str] = []

    def num_cached(one: Request) -> int:
        looked_up.append(one.request_id)
        return int(one.request_id)

    policy = LongestPrefixFirst(window=10, max_lookups=4, patience_s=5)
    now = 10.0
    policy.bind(lambda: now, num_cached)
    requests = [request(str(i), arrival=float(i)) for i in range(20)]
    order = policy.schedule(requests, 0)
    assert len(looked_up) == 4 and len(order) == 20
    policy.schedule(requests, 0)
    policy.schedule(requests, 0)
    assert len(looked_up) == 12 and set(looked_up) == {str(i) for i in range(10)}
    now = 12.0
    order = policy.schedule(requests, 0)
    assert [int(r.request_id) for r in order[:10]] == [0, 1, 2, 3, 4, 5, 6, 7, 9, 8]


def test_a_policy_that_overrides_schedule_decides_alone() -> None:
    class LastFirst(SchedulingPolicy):
        asked: list[int] = []  # noqa: RUF012

        def schedule(self, requests: Sequence[Request], available_blocks: int) -> list[Request]:
            self.asked.append(available_blocks)
            return [r for r in reversed(requests) if r.priority >= 0 or len(requests) == 1]

    policy = LastFirst()
    world = World(policy=policy, max_num_seqs=1, num_blocks=64)
    world.add(5, priority=-1)
    world.add(5, n=2)
    world.add(5)
    world.run()
    assert world.order_of_ends == ["r2", "r1", "r1", "r0"]
    assert policy.asked[0] == 64


def test_a_policy_with_a_key_over_time_is_asked_anew() -> None:
    class Flip(SchedulingPolicy):
        def key(self, request: Request, now: float) -> float:
            return request.arrival if now < 200 else -request.arrival

    world = World(policy=Flip(), max_num_seqs=1)
    for _ in range(4):
        world.add(5, max_tokens=2)
        world.now += 1
    world.step()
    world.step()
    world.now = 200
    world.run()
    assert world.order_of_ends == ["r0", "r3", "r2", "r1"]


# Fair share


def test_fair_share_alternates_between_a_flood_and_a_trickle() -> None:
    world = World(policy="fair-share", max_num_seqs=1)
    for _ in range(20):
        world.add(8, tenant="flood")
    for _ in range(3):
        world.add(8, tenant="trickle")
    world.run()
    where = [i for i, name in enumerate(world.order_of_ends) if name in {"r20", "r21", "r22"}]
    assert where[-1] <= 6


def test_fair_share_follows_weights() -> None:
    world = World(policy=FairShare({"big": 3.0}), max_num_seqs=1)
    for _ in range(12):
        world.add(8, tenant="big")
        world.add(8, tenant="small")
    world.run()
    first = world.order_of_ends[:8]
    assert sum(int(name[1:]) % 2 == 0 for name in first) == 6
    with pytest.raises(InvalidOptionError, match="weight"):
        FairShare({"x": 0.0})


def test_weights_can_change_while_requests_wait() -> None:
    policy = FairShare()
    world = World(policy=policy, max_num_seqs=1)
    for _ in range(12):
        world.add(8, tenant="a")
        world.add(8, tenant="b")
    for _ in range(16):
        world.step()
    done = len(world.order_of_ends)
    with pytest.raises(InvalidOptionError, match="weight"):
        policy.set_weights({"a": -1.0})
    policy.set_weights({"a": 3.0})
    world.run()
    later = world.order_of_ends[done + 1 : done + 9]
    assert sum(int(name[1:]) % 2 == 0 for name in later) >= 5, "with equal weights it would be 4"


def test_within_a_tenant_the_higher_priority_runs_first() -> None:
    world = World(policy="fair-share", max_num_seqs=1)
    for tenant, priority in (("a", 0), ("a", 2), ("a", 1), ("b", 0)):
        world.add(8, tenant=tenant, priority=priority)
    world.run()
    assert [name for name in world.order_of_ends if name != "r3"] == ["r1", "r2", "r0"]
    assert world.order_of_ends.index("r3") <= 1, "a priority is worth nothing against another tenant"


@pytest.mark.no_cover
@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_tenants_with_enough_to_do_are_served_by_their_weights(
    weights: list[float], max_num_seqs: int, seed: int
) -> None:
    """Start-time fairness: served tokens over weight differ by no more than one request of each slot and tenant."""
    rng = random.Random(seed)
    policy = FairShare({f"t{i}": weight for i, weight in enumerate(weights)})
    world = World(policy=policy, max_num_seqs=max_num_seqs, num_blocks=256, max_queue_size=1000)
    longest = 16
    for _ in range(30):
        for i in range(len(weights)):
            num_prompt = rng.randint(2, 8)
            world.add(num_prompt, max_tokens=rng.randint(1, longest - num_prompt), tenant=f"t{i}")
    waiting = world.scheduler.queue_status
    while all(waiting()["tenants"].get(f"t{i}", {"waiting": 0})["waiting"] > max_num_seqs for i in range(len(weights))):
        world.step()
    shares = [policy.group_key(f"t{i}") for i in range(len(weights))]
    most = 2 * max_num_seqs * longest / min(weights)
    assert max(shares) - min(shares) <= most


def test_a_tenant_that_was_idle_has_no_credit() -> None:
    world = World(policy="fair-share", max_num_seqs=1)
    world.add(4, tenant="idle")
    world.run()
    for _ in range(10):
        world.add(8, tenant="busy")
    for _ in range(25):
        world.step()
    for _ in range(6):
        world.add(8, tenant="idle")
    done = len(world.order_of_ends)
    world.run()
    tail = [int(name[1:]) > 10 for name in world.order_of_ends[done : done + 6]]
    assert 2 <= sum(tail) <= 4, "the two must alternate, not the returning one catch up"


def test_fair_share_forgets_tenants_that_are_long_gone() -> None:
    policy = FairShare()
    policy.MAX_IDLE_TENANTS = 8
    for i in range(100):
        one = request(f"{i}", tenant=f"t{i}")
        policy.arrived(one)
        policy.charge(one, 1)
        policy.left(one)
    assert len(policy._served) <= 10


# Queues


@pytest.mark.parametrize("name", ["fcfs", "priority", "deadline", "fair-share"])
def test_static_policies_are_asked_for_a_key_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = scheduling_policy(name)
    queue = policies.queue_for(policy)
    assert isinstance(queue, policies.GroupedQueue)
    key = spy_on(monkeypatch, policy, "key")
    streams = [Stream(request(str(i), arrival=i * 37 % 100, tenant=f"t{i % 3}")) for i in range(1000)]
    for order, stream in enumerate(streams):
        policy.arrived(stream.request)
        queue.push(stream, order)
    for _ in range(50):
        assert len(list(queue.ordered(10, 5))) in (5, 15)
    assert key.call_count == 1000 and len(queue.entries) == 1000


@pytest.mark.parametrize("kind", [policies.GroupedQueue, policies.PolicyQueue])
def test_a_queue_keeps_old_places(kind: type[policies.GroupedQueue | policies.PolicyQueue]) -> None:
    queue = kind(scheduling_policy("fcfs"))
    streams = [Stream(request(str(i), arrival=1.0)) for i in range(5)]
    for order, stream in enumerate(streams):
        queue.push(stream, order)
    queue.remove(streams[1])
    queue.remove(streams[4])
    queue.push(streams[1], 1)
    assert list(queue.ordered(0, 10)) == streams[:4]
    assert [stream in queue.entries for stream in streams] == [True, True, True, True, False]


@pytest.mark.parametrize("depth", [0, 1])
@given(st.integers(1, 8), st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=4))
def test_a_tenant_is_charged_what_was_computed(depth: int, num_proposed: int, seeds: list[int | None]) -> None:
    """With drafts that are right (seed 0), drafts that are wrong (seed 1) and without drafts (None)."""
    world = World(
        num_blocks=400, policy="fair-share", depth=depth, speculation=Speculation(OracleDrafter(), num_proposed)
    )
    policy, computed, execute = world.scheduler.policy, dict[str, int](), world.runner.execute
    assert isinstance(policy, FairShare)

    def counted(plan: Plan) -> StepResult:
        for seq, count in zip(plan.sequences, plan.input.counts.tolist(), strict=True):
            computed[seq.request.namespace.tenant] = computed.get(seq.request.namespace.tenant, 0) + count
        return execute(plan)

    world.runner.execute = counted  # type: ignore[method-assign]
    for number, seed in enumerate(seeds):
        world.add(8, max_tokens=100, tenant=str(number), seed=seed or 0, params={"speculate": seed is not None})
    world.run()
    assert policy._served == computed
    assert all(100 + 7 <= charged <= 2000 for charged in computed.values())
