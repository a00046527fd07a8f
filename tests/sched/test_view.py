"""What a tenant sees of memory and tree, compared with a count of every block."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from archerfish.sched import view as views
from archerfish.sequence import Sequence
from tests.cache.invariants import owned_blocks
from tests.sched.worlds import World

Classes = dict[int, tuple[str, set[str]]]  # of each block: its kind, and the tenants that have it


def classes(world: World) -> Classes:
    """By looking at every node and every sequence."""
    live = world.scheduler._live
    found: Classes = {}

    def add(block: int, kind: str, tenant: str) -> None:
        before = found.get(block, (kind, set()))
        found[block] = "running" if "running" in (kind, before[0]) else "cached", before[1] | {tenant}

    for namespace, tree in world.cache._trees.items():
        for node in tree.nodes():
            for block in node.blocks[node.shares_first :]:
                add(block, "running" if node.lock_count else "cached", namespace.tenant)
    for seq in live.holders():
        for block in [*seq.blocks, *(seq.draft.states if seq.draft is not None else ())]:
            add(block, "running", seq.request.namespace.tenant)
    return found


def counts_of(view: dict[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for kind, count in view["blocks"]["runs"]:
        assert count > 0
        found[kind] += count
    assert found.total() == view["blocks"]["total"]
    return found


def check_views(world: World, *, is_cleared: bool = False) -> None:
    """Blocks add up to the pool's size and are those that a full count finds.

    is_cleared: sequences may share blocks that are in no tree any more; then blocks need only add up.
    """
    found, free = classes(world), world.blocks.num_free
    for tenant in ("a", "b"):
        expected = Counter(kind for kind, tenants in found.values() if tenant in tenants)
        own, all_of_them = (counts_of(world.scheduler.view(tenant, sees_all=sees_all)) for sees_all in (False, True))
        assert own["free"] == own["others"] == all_of_them["hidden"] == 0
        if not is_cleared:
            assert (own["running"], own["cached"]) == (expected["running"], expected["cached"])
            assert (all_of_them["running"], all_of_them["cached"]) == (expected["running"], expected["cached"])
            assert all_of_them["free"] == free
    whole = world.scheduler.view("", sees_all=True)
    counts_of(whole)
    kinds = [kind for kind, count in whole["blocks"]["runs"] for _ in range(count)]
    held = set().union(*owned_blocks(world.scheduler)) - found.keys()  # sources of copies, after a clear
    assert whole["blocks"]["order"] == "memory"
    assert all(kinds[block] == "free" for block in range(len(kinds)) if block not in found and block not in held)
    assert is_cleared or all(kinds[block] == kind for block, (kind, _) in found.items())


@pytest.mark.parametrize("has_states", [False, True])
def test_blocks_of_each_kind_are_those_of_a_full_count(has_states: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        rng = random.Random(seed)
        world = World(
            num_blocks=rng.choice([20, 40, 200]), block_size=rng.choice([1, 3, 4]), depth=1, has_states=has_states
        )
        sequences: list[Sequence] = []
        for _ in range(60):
            if rng.random() < 0.4 and len(sequences) < 40:
                prompt = [rng.randrange(3), *range(rng.randrange(1, 14))]
                sequences += world.add(prompt, rng.randrange(1, 5), tenant=rng.choice("ab"), n=rng.choice([1, 1, 2]))
            if rng.random() < 0.05 and sequences:
                world.scheduler.abort(rng.choice(sequences).request.request_id)
            world.step()
            check_views(world)
            seen += counts_of(world.scheduler.view("a", sees_all=True))
        world.run()
        check_views(world)
    assert min(seen[kind] for kind in ("running", "cached", "others", "free")) > 50, seen


def test_large_pools_are_not_mapped_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.add(20, 3)
    world.step()
    mapped = counts_of(world.scheduler.view("", sees_all=True))
    monkeypatch.setattr(views, "MAX_MAPPED", 63)
    sorted_view = world.scheduler.view("", sees_all=True)
    assert sorted_view["blocks"]["order"] == "kind" and len(sorted_view["blocks"]["runs"]) <= 3
    assert counts_of(sorted_view) == mapped


def test_nodes_are_the_recent_ones_with_their_parents() -> None:
    world = World(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=640, max_queue_size=1000)
    shared = [7, 8, 9, 10]
    for number in range(300):
        world.add([*shared, 1000 + number, 5], 1)
    world.run()
    world.now += 30
    (seq,) = world.add([*shared, 1299, 5, 6], 2)
    world.step()
    view = world.scheduler.view("", sees_all=True)
    nodes = view["nodes"]
    assert (
        len(nodes) == views.MAX_NODES < view["num_nodes"] == 302
    )  # the shared part, one of each prompt, the new end of one
    for place, node in enumerate(nodes):
        assert node["parent"] < place
        assert node["start"] == (nodes[node["parent"]]["end"] if node["parent"] >= 0 else 0)
        assert len(node["preview"]) == min(views.MAX_PREVIEW, node["end"] - node["start"])
    first = nodes[0]
    assert (first["preview"], first["num_children"], first["parent"], first["locks"]) == (shared, 300, -1, 1)
    assert [node["preview"] for node in nodes[1:3]] == [[1299, 5], [6]] and nodes[1]["age_s"] == 0
    assert nodes[3]["age_s"] == 30
    assert (view["num_running"], view["cached_tokens"] > 0, seq.hit.num_matched) == (1, True, 6)


def test_view_of_a_large_tree_looks_at_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is bounded because the number of nodes that are looked at is."""
    world = World(num_blocks=4000, max_num_seqs=256, max_num_batched_tokens=2560, max_queue_size=3000)
    for number in range(1500):
        world.add([1000 + number, 5], 1)
    world.run()
    pushed: list[Any] = []

    def push(heap: list[Any], item: Any) -> None:
        pushed.append(item)
        heap.append(item)
        heap.sort()

    monkeypatch.setattr("heapq.heappush", push)
    view = world.scheduler.view("", sees_all=True)
    assert view["num_nodes"] == 1500
    assert len(view["nodes"]) <= views.MAX_NODES and len(pushed) <= views.MAX_CHILDREN
