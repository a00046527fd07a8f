"""The choice of a replica."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from archerfish.cache.digest import DIGEST_TOKENS, PathHash, PrefixDigest
from archerfish.errors import InvalidOptionError
from archerfish.route.prefixes import EXPECTED_S, PrefixMap
from archerfish.route.router import ReplicaLoad, Route, Router
from archerfish.sequence import Namespace, pack_tokens

SECRET, MODEL = b"a secret", "model"
TENANT, OTHER = Namespace("one"), Namespace("two")
LONG = pack_tokens(range(1024))


class Service:
    """A router over replicas that measure 1 ms for each token of a prompt, and whose caches are full."""

    def __init__(self, num_replicas: int = 3, policy: str = "cache-aware") -> None:
        self.now = 0.0
        self.router = Router(SECRET, policy=policy, clock=lambda: self.now)
        self.replicas = [self.router.add(f"replica-{i}") for i in range(num_replicas)]
        self.digests = [PrefixDigest(SECRET) for _ in self.replicas]
        for i in range(num_replicas):
            self.report(i)

    def cache(self, index: int, tokens: array[int], namespace: Namespace = TENANT) -> None:
        hashes = PathHash().prefixes(0, 0, tokens.tobytes(), 0, len(tokens))
        self.digests[index].add(hashes, MODEL, namespace)

    def report(self, index: int, asked_at: float | None = None, **load: object) -> None:
        _, data, begins_anew = self.digests[index].changes(0, 1 << 20)
        loads = {MODEL: ReplicaLoad(**{"prompt_token_s": 0.001, "cache_use": 1.0, **load})}  # type: ignore[arg-type]
        self.router.report(self.replicas[index], loads, data, begins_anew=begins_anew, asked_at=asked_at)

    def choose(self, tokens: array[int] = LONG, namespace: Namespace = TENANT, **options: object) -> Route:
        route = self.router.choose(MODEL, tokens, namespace, **options)  # type: ignore[arg-type]
        assert route is not None
        return route

    def send(self, tokens: array[int] = LONG, namespace: Namespace = TENANT) -> Route:
        route = self.choose(tokens, namespace)
        self.router.sent(route)
        return route


def test_longest_prefix_wins_and_says_why() -> None:
    service = Service()
    service.cache(1, LONG[:300])
    service.cache(2, LONG[:900])
    for i in range(3):
        service.report(i)
    route = service.choose(explains=True)
    assert (route.replica.name, route.num_cached) == ("replica-2", 896)
    assert route.expected_s == pytest.approx(0.128)
    assert [(name, num) for name, num, _ in route.others] == [("replica-1", 256), ("replica-0", 0)]
    assert "896 of 1,024" in route.explain() and "replica-1, has 256" in route.explain()


def test_a_queue_that_takes_longer_than_twice_what_the_prefix_saves_loses() -> None:
    """Red: a miss does not count as taking another prefix's place in the cache."""
    service = Service(2)
    service.cache(0, LONG)
    service.report(0, waiting_tokens={"one": 2000})
    assert service.choose().replica.index == 0
    service.report(0, waiting_tokens={"one": 2100})
    assert service.choose().replica.index == 1


def test_replicas_without_the_model_are_left_out() -> None:
    """Red: a replica that does not serve the model yet looks idle, as in an update that adds one."""
    service = Service(2)
    new = {MODEL: ReplicaLoad(0.001), "new": ReplicaLoad(0.001, num_running=9, step_s=0.1)}
    service.router.report(service.replicas[1], new)
    for name, wanted in (("new", 1), ("nobody's", 0)):
        route = service.router.choose(name, LONG, TENANT)
        assert route is not None and route.replica.index == wanted


def test_work_of_other_models_counts() -> None:
    service = Service(2)
    busy = {MODEL: ReplicaLoad(0.001, cache_use=1.0), "encoder": ReplicaLoad(step_s=0.05, num_waiting=3)}
    service.router.report(service.replicas[0], busy)
    assert service.choose().replica.index == 1
    busy["encoder"] = ReplicaLoad(step_s=0.05)
    service.router.report(service.replicas[0], busy)
    assert service.choose().replica.index == 0


def test_new_prompts_go_where_the_cache_has_room() -> None:
    """Red: idle replicas whose measurements differ a little, of which one gets everything until its cache is full."""
    service = Service(2)
    service.report(0, prompt_token_s=0.0008)
    service.report(1, cache_use=0.2)
    assert service.choose().replica.index == 1
    service.cache(0, LONG)
    service.report(0, prompt_token_s=0.0008)
    assert service.choose().replica.index == 0


def test_a_full_replica_waits_for_a_place() -> None:
    service = Service(2)
    service.cache(0, LONG)
    for slot_s, expected in ((1.5, 0), (2.1, 1)):
        service.report(0, num_running=8, max_running=8, slot_s=slot_s)
        assert service.choose().replica.index == expected


def test_long_answers_drive_new_requests_away() -> None:
    """Red: only the first token counts, for which a replica full of long answers is as good as an idle one."""
    service = Service(2)
    service.cache(0, LONG[:64])
    for step_s, expected in ((0.011, 0), (0.015, 1)):
        service.report(0, num_running=50, step_s=step_s)
        service.report(1, num_running=1, step_s=0.001)
        assert service.choose().replica.index == expected


def test_a_burst_of_one_prefix_goes_where_the_first_went_until_the_queue_is_longer() -> None:
    """Red: prompts that were sent but not reported count neither as cached nor as waiting."""
    service = Service(4)
    stem = LONG[:960]
    routes = [service.send(pack_tokens([*stem, *[number] * 64])) for number in range(80)]
    counts = [sum(route.replica.index == i for route in routes) for i in range(4)]
    assert sum(route.num_cached >= 960 for route in routes) >= 76
    assert min(counts) > 0


def test_equal_replicas_share_requests() -> None:
    service = Service(4)
    random = Random(3)
    for _ in range(40):
        service.send(pack_tokens(random.randrange(1000) for _ in range(100)))
    assert [len(replica.unreported) for replica in service.replicas] == [10] * 4


def test_reports_replace_what_was_sent_before_they_were_asked_for() -> None:
    service = Service(1)
    first = service.send()
    service.now = 1.0
    second = service.send()
    assert second.num_cached == 1024  # it is expected in the cache
    assert service.choose(LONG[:63]).expected_s == pytest.approx(1.024 + 0.063)
    service.now = 2.0
    service.report(0, asked_at=0.5, waiting_tokens={"one": 700})
    assert list(first.replica.unreported.values()) == [second]
    assert service.choose(LONG[:63]).expected_s == pytest.approx(0.7 + 0.063)
    service.router.ended(second)
    service.router.ended(first)
    assert (first.replica.num_live, first.replica.unreported) == (0, {})


def test_a_prompt_counts_as_cached_where_it_was_sent_until_a_report_after_its_end() -> None:
    service = Service(1)
    route = service.send()
    service.now = 1.0
    service.router.ended(route)
    service.now = 2.0
    for asked_at, expected in ((0.5, 1024), (1.5, 0)):  # the second report does not have it: it was evicted
        service.router.report(route.replica, {}, asked_at=asked_at)
        assert service.choose().num_cached == expected


def test_tenants_wait_for_their_share_only() -> None:
    """A tenant's flood on the replica that has another's prefix does not drive that one away, if tenants take turns."""
    service = Service(2)
    service.cache(0, LONG, OTHER)
    service.report(0, waiting_tokens={"one": 100_000}, is_fair=True)
    assert service.choose(LONG, OTHER).replica.index == 0
    assert service.choose(LONG, TENANT).replica.index == 1
    service.report(0, waiting_tokens={"one": 100_000}, is_fair=False)
    assert service.choose(LONG, OTHER).replica.index == 1


def test_routes_do_not_depend_on_what_another_tenant_has_cached() -> None:
    empty, full = Service(4), Service(4)
    full.cache(2, LONG, OTHER)
    full.report(2)
    random = Random(5)
    for _ in range(20):
        tokens = LONG[: random.randrange(1, 1024)]
        mine, theirs = empty.send(tokens), full.send(tokens)
        found = [(route.replica.index, route.num_cached, route.expected_s) for route in (mine, theirs)]
        assert found[0] == found[1]


def test_lost_paused_and_removed_replicas_get_nothing() -> None:
    service = Service(3)
    service.cache(0, LONG)
    service.report(0)
    service.router.pause(service.replicas[0])
    assert service.choose().replica.index != 0
    service.report(0)
    assert service.choose(without=[service.replicas[0]]).replica.index != 0
    assert service.choose().num_cached == 1024
    service.router.lost(service.replicas[0])
    service.router.report(service.replicas[0], {MODEL: ReplicaLoad(0.001)})
    assert service.choose().num_cached == 0
    for replica in service.replicas:
        service.router.remove(replica)
    assert service.router.choose(MODEL, LONG, TENANT) is None
    assert Router(SECRET).choose(MODEL) is None
    assert (service.router.add("new").index, len(service.router.replicas)) == (0, 3)


@pytest.mark.parametrize(("policy", "most"), [("round-robin", 10), ("least-loaded", 10), ("random", 25)])
def test_other_policies_ignore_the_cache(policy: str, most: int) -> None:
    service = Service(4, policy)
    service.cache(1, LONG)
    service.report(1)
    routes = [service.send() for _ in range(40)]
    assert max(sum(route.replica.index == i for route in routes) for i in range(4)) <= most


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="no routing policy 'round-robbin'") as caught:
        Router(SECRET, policy="round-robbin")
    assert "round-robin" in str(caught.value.hint)


def test_prefix_map_follows_sets() -> None:
    """Lengths are those of the longest prefix without a gap, for random sets of published and expected hashes."""
    random = Random(11)
    table = PrefixMap()
    sets = [set[int]() for _ in range(70)]
    hashes = [2 * number + 1 for number in range(30)]
    for _ in range(300):
        replica = random.randrange(70)
        one = hashes[random.randrange(30)]
        if random.random() < 0.8:
            sets[replica].add(one)
            table.apply(replica, array("Q", [one]).tobytes())
        else:
            sets[replica].discard(one)
            table.apply(replica, array("Q", [one - 1]).tobytes())
    table.expect(5, hashes[:12], now=0.0)
    for now in (1.0, EXPECTED_S + 1):
        having = [present | set(hashes[:12]) if now == 1.0 and i == 5 else present for i, present in enumerate(sets)]
        wanted = [next((n for n, one in enumerate(hashes) if one not in present), 30) for present in having]
        assert table.lengths(hashes, 70, now).tolist() == wanted


def test_prompt_of_few_tokens_has_no_hashes() -> None:
    service = Service()
    assert service.choose(LONG[: DIGEST_TOKENS - 1]).hashes == []
    assert service.choose(array("I"), num_tokens=500).expected_s == pytest.approx(0.5)
