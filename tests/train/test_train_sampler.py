"""The training order: every sample once per epoch, the same global batches for every number of ranks."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

from train.sampler import GlobalBatches, Shard

pytestmark = pytest.mark.torch
GRID = list(itertools.product((1, 7, 10, 64, 101), (1, 4, 16, 128), (1, 2, 3, 8)))


def shards(samples: int, batch: int, world: int, epoch: int = 0, first: int = 0) -> list[list[Shard]]:
    """Per rank, its shards of the epoch."""
    return [
        list(
            GlobalBatches(samples=samples, batch_size=batch, seed=5, rank=rank, world=world).epoch(
                epoch, first
            )
        )
        for rank in range(world)
    ]


def used(shard: Shard) -> list[int]:
    return shard.indices[: shard.count]


@pytest.mark.parametrize(("samples", "batch", "world"), GRID)
def test_each_sample_is_used_exactly_once_per_epoch(samples: int, batch: int, world: int) -> None:
    taken = [index for rank in shards(samples, batch, world) for shard in rank for index in used(shard)]
    assert sorted(taken) == list(range(samples))


@pytest.mark.parametrize(("samples", "batch", "world"), GRID)
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples: int, batch: int, world: int) -> None:
    alone = [set(used(shard)) for shard in shards(samples, batch, 1)[0]]
    together = [
        set().union(*(used(shard) for shard in step))
        for step in zip(*shards(samples, batch, world), strict=True)
    ]
    assert together == alone


@pytest.mark.parametrize(("samples", "batch", "world"), GRID)
def test_counts_of_a_step_add_up_to_its_global_count(samples: int, batch: int, world: int) -> None:
    for step in zip(*shards(samples, batch, world), strict=True):
        assert {shard.global_count for shard in step} == {sum(shard.count for shard in step)}


def test_an_idle_rank_still_has_something_to_run_at_weight_0() -> None:
    last = [rank[-1] for rank in shards(22, 5, 3)]
    assert [shard.count for shard in last] == [1, 1, 0]
    assert len(last[2].indices) == 1


def test_order_changes_with_the_epoch_and_the_seed_and_with_nothing_else() -> None:
    one = GlobalBatches(samples=50, batch_size=8, seed=1)
    assert one.order(0) == GlobalBatches(samples=50, batch_size=8, seed=1, rank=1, world=4).order(0)
    orders = [
        GlobalBatches(samples=50, batch_size=8, seed=seed).order(epoch)
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(map(tuple, orders))) == 9  # the second epoch of one seed is not the first of the next


def test_an_epoch_entered_in_the_middle_goes_on_as_if_it_had_been_run_from_the_start() -> None:
    assert shards(23, 4, 2, epoch=3, first=2)[1] == shards(23, 4, 2, epoch=3)[1][2:]
