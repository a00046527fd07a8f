from __future__ import annotations

import gc

from archerfish.bench import cache as bench


def test_the_tree_has_the_nodes_that_the_row_says() -> None:
    for size in (1, 500, 1000, 1001, 2500):
        cache = bench._filled(size, 3)
        cache.check([])
        assert cache.stats().node_count == size
        assert cache.blocks.num_free == 3


def test_every_cost_is_measured_and_small() -> None:
    rows = bench.measure_cache(sizes=(1_000, 3_000))
    assert [row.num_nodes for row in rows] == [1_000, 3_000]
    for row in rows:
        assert all(value > 0 for value in row.as_dict().values())
        assert row.match_ns_per_token < 1_000 and row.insert_ns_per_token < 1_000
    assert [row.num_tokens for row in bench.measure_lengths((64, 128))] == [64, 128]
    assert gc.isenabled()
