from __future__ import annotations

import itertools

import pytest

from kernels import reduce
from pipeline.layout import (
    MeshShape,
    ModelShape,
    layout_name,
    micro_batches,
    num_leaves,
    owned_positions,
    owned_samples,
    shard,
    split_evenly,
    split_leaves,
    tile_owner,
)

TINY = ModelShape(num_layers=2, hidden=96, intermediate=192, num_heads=24, num_kv_heads=12, head_dim=8, vocab=320)


def covers(ranges: list[tuple[int, int]], size: int) -> bool:
    """The ranges are [0, size) cut in order, without a gap."""
    return [a for a, _ in ranges] + [size] == [0] + [b for _, b in ranges]


@pytest.mark.parametrize("tp, cp, dp", itertools.product((1, 2, 3), repeat=3))
def test_each_kind_of_group_has_every_rank_once(tp, cp, dp):
    mesh = MeshShape(tp, cp, dp)
    everyone = list(range(mesh.world_size))
    for groups, size in ((mesh.tp_groups(), tp), (mesh.cp_groups(), cp), (mesh.gradient_groups(), cp * dp)):
        assert sorted(itertools.chain(*groups)) == everyone and {len(group) for group in groups} == {size}
    assert [mesh.rank(*mesh.coordinates(rank)) for rank in everyone] == everyone
    assert all(len({mesh.coordinates(rank)[0] for rank in group}) == 1 for group in mesh.gradient_groups())


def test_tp_is_the_fastest_axis():
    assert MeshShape(2, 2, 2).tp_groups()[0] == [0, 1] and MeshShape(2, 2, 2).cp_groups()[0] == [0, 2]
    assert MeshShape(2, 2, 2).gradient_groups()[0] == [0, 2, 4, 6]


@pytest.mark.parametrize("n, parts", [(0, 3), (7, 1), (7, 3), (8, 3), (3, 8), (24, 12)])
def test_even_splits_cover_and_differ_by_at_most_one(n, parts):
    ranges = [split_evenly(n, parts, i) for i in range(parts)]
    assert covers(ranges, n)
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("size, leaf, parts", [(192, 16, 5), (320, 32, 3), (100, 32, 2), (100, 32, 4), (151936, 4748, 7)])
def test_leaf_splits_cover_and_cut_only_at_leaves(size, leaf, parts):
    ranges = [split_leaves(size, leaf, parts, i) for i in range(parts)]
    assert covers(ranges, size)
    assert all(a % leaf == 0 for a, _ in ranges)


@pytest.mark.parametrize("n", [1, 2, 5, 10, 12, 24])
def test_nodes_of_a_range_are_maximal_and_cover_it(n):
    def subtree(lo: int, hi: int) -> set[tuple[int, int]]:
        mid = (lo + hi) // 2
        return {(lo, hi)} | (subtree(lo, mid) | subtree(mid, hi) if hi - lo > 1 else set())

    every = subtree(0, n)
    for a in range(n):
        for b in range(a, n + 1):
            nodes = reduce.nodes(n, a, b)
            assert set(nodes) <= every
            assert [leaf for lo, hi in nodes for leaf in range(lo, hi)] == list(range(a, b))
            inside = {node for node in every if a <= node[0] and node[1] <= b}
            assert all(not any(big[0] <= lo and hi <= big[1] and big != (lo, hi) for big in inside) for lo, hi in nodes)
    assert reduce.nodes(n, 0, n) == [(0, n)] and reduce.nodes(0, 0, 0) == []


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 8, 61, 64])
def test_every_position_has_one_context_parallel_owner(length, cp):
    owned = [owned_positions(length, 8, cp, c) for c in range(cp)]
    assert covers(sorted(itertools.chain(*owned)), length)
    assert all(a % 8 == 0 for ranges in owned for a, _ in ranges)


def test_causal_work_is_balanced():
    work = [sum(tile for tile in range(16) if tile_owner(tile, 4) == c) for c in range(4)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("samples, dp, micro_batch", [(16, 1, 4), (16, 3, 4), (8, 3, 0), (5, 4, 2), (16, 16, 1)])
def test_every_rank_runs_the_same_number_of_forwards_and_every_sample_once(samples, dp, micro_batch):
    batches = [micro_batches(owned_samples(samples, dp, d), micro_batch, samples, dp) for d in range(dp)]
    assert len({len(own) for own in batches}) == 1
    assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(samples))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])
def test_shards_cover_each_parameter(tp):
    axes = {
        "model.layers.0.self_attn.q_proj.weight": (0, 192), "model.layers.0.self_attn.k_proj.weight": (0, 96),
        "model.layers.0.self_attn.v_proj.weight": (0, 96), "model.layers.0.self_attn.o_proj.weight": (1, 192),
        "model.layers.1.mlp.gate_proj.weight": (0, 192), "model.layers.1.mlp.down_proj.weight": (1, 192),
        "model.embed_tokens.weight": (0, 320), "lm_head.weight": (0, 320),
    }  # fmt: skip
    for name, (dim, size) in axes.items():
        shards = [shard(name, TINY, 16, 32, tp, t) for t in range(tp)]
        assert {s[0] for s in shards} == {dim} and covers([s[1:] for s in shards], size), name  # type: ignore[index]
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert shard(name, TINY, 16, 32, tp, 0) is None


def test_query_heads_stay_with_their_kv_heads():
    for tp in (2, 3, 4, 6):
        for t in range(tp):
            q, kv = (split_evenly(n, tp, t) for n in (TINY.num_heads, TINY.num_kv_heads))
            group = TINY.num_heads // TINY.num_kv_heads
            assert q == (kv[0] * group, kv[1] * group)


def test_model_shape_fills_what_older_configs_leave_out():
    shape = ModelShape.from_hf(
        {"num_attention_heads": 9, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
    )
    assert (shape.num_kv_heads, shape.head_dim) == (9, 64)


@pytest.mark.parametrize(
    "degrees, name",
    [
        ((1, 1, 1, 0), "tp1cp1dp1"),
        ((2, 4, 1, 0), "tp2cp4"),
        ((1, 1, 2, 3), "dp2z3"),
        ((1, 1, 1, 2), "tp1cp1dp1z2"),
        ((3, 2, 2, 1), "tp3cp2dp2z1"),
    ],
)
def test_layout_names(degrees, name):
    assert layout_name(*degrees) == name


def test_num_leaves_rounds_up():
    assert [num_leaves(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
