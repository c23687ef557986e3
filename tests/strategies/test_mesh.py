"""Sizes, rank order and process groups, without processes."""

import re
import time

import pytest

from lightning_gem.strategies.mesh import Axes, process_groups, rank_grids, resolve_axes


def test_defaults_are_one_zone() -> None:
    assert resolve_axes(8) == Axes(1, 8, 1, 8, 1, copies_in_host=True)


def test_zones_get_copies() -> None:
    axes = resolve_axes(64, host_size=8, zone_size=16)
    assert axes == Axes(4, 16, 1, 16, 4, copies_in_host=False)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"replicate": 2}, (2, 4, 1, 8, 1)),
        ({"shard": 2}, (4, 2, 1, 8, 1)),
        ({"table": 2}, (1, 8, 1, 2, 4)),
        ({"table_replicate": 2, "expert": 4}, (1, 8, 4, 4, 2)),
        ({"replicate": 2, "shard": 4, "expert": 2, "table": 4, "table_replicate": 2}, (2, 4, 2, 4, 2)),
    ],
)
def test_auto_is_what_is_left(sizes: dict[str, int], expected: tuple[int, ...]) -> None:
    axes = resolve_axes(8, **sizes)
    assert (axes.replicate, axes.shard, axes.expert, axes.table, axes.table_replicate) == expected


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (8, {"replicate": 3}, "replicate=3 does not divide the world size=8: use one of [1, 2, 4, 8]"),
        (8, {"shard": 5}, "shard=5 does not divide the world size=8"),
        (8, {"replicate": 2, "shard": 2}, "replicate=2 times shard=2 is 4, but the world has 8 ranks"),
        (8, {"table": 4, "table_replicate": 4}, "table_replicate=4 times table=4 is 16"),
        (8, {"expert": 8, "shard": 4}, "expert=8 does not divide shard=4"),
        (16, {"expert": 16, "host_size": 8}, "expert=16 is larger than the host of 8 ranks"),
        (12, {"expert": 4, "host_size": 6}, "expert=4 does not divide the host of 6 ranks"),
        (16, {"table_replicate": 16, "host_size": 8}, "table_replicate=16 is larger than the host of 8 ranks"),
        (64, {"shard": 32, "host_size": 8, "zone_size": 16}, "shard=32 is larger than the zone of 16 ranks"),
        (64, {"table": 64, "host_size": 8, "zone_size": 16}, "table=64 is larger than the zone of 16 ranks"),
        (12, {"host_size": 8}, "host_size=8 does not divide zone_size=12"),
        (12, {"host_size": 4, "zone_size": 8}, "zone_size=8 does not divide the world size=12"),
        (8, {"shard": 0}, 'shard must be a positive integer or "auto", not 0'),
        (8, {"table": True}, 'table must be a positive integer or "auto", not True'),
    ],
)
def test_errors_name_field_and_fix(world: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_axes(world, **sizes)


def test_rank_order() -> None:
    axes = resolve_axes(16, host_size=4, replicate=2, expert=2, table_replicate=2)
    groups = process_groups(axes)
    assert groups["shard"][1] == list(range(8, 16))
    assert groups["replicate"][3] == [3, 11]
    assert groups["expert"][1] == [2, 3]
    assert groups["expert_shard"][1] == [1, 3, 5, 7]
    assert groups["table_replicate"][0] == [0, 1]
    assert groups["table"][1] == [1, 3, 5, 7, 9, 11, 13, 15]


@pytest.mark.parametrize("world", [1, 2, 8, 64, 1024, 4096])
@pytest.mark.parametrize("zones", [1, 2, 4])
def test_groups_partition_the_ranks_inside_their_tiers(world: int, zones: int) -> None:
    if zones > world:
        pytest.skip("more zones than ranks")
    start = time.monotonic()
    zone, host = world // zones, min(8, world // zones)
    experts = min(4, host)
    copies = min(2, host) if zones == 1 else zones * min(2, zone)
    axes = resolve_axes(world, host, zone, expert=experts, table_replicate=copies)
    groups = process_groups(axes)
    tiers = {"expert": host, "shard": zone, "expert_shard": zone, "table": zone}
    if zones == 1:
        tiers["table_replicate"] = host
    for name, members in groups.items():
        assert sorted(rank for group in members for rank in group) == list(range(world)), name
        tier = tiers.get(name, world)
        assert all(group[0] // tier == group[-1] // tier for group in members), name
    sizes = {name: len(members[0]) for name, members in groups.items()}
    assert sizes["replicate"] * sizes["expert_shard"] * sizes["expert"] == world
    assert sizes["table"] * sizes["table_replicate"] == world
    assert time.monotonic() - start < 5


def test_grids_are_named() -> None:
    grids = rank_grids(resolve_axes(8, expert=2))
    assert {name: names for name, (names, _) in grids.items()} == {
        "dense": ("replicate", "shard"),
        "experts": ("replicate", "expert_shard", "expert"),
        "tables": ("table_replicate", "table"),
    }
