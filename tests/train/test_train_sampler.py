"""Training order: every sample once per epoch, and the same global batches for every number of ranks."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

from train.data.sampler import GlobalBatchSampler, RankBatch

pytestmark = pytest.mark.torch
GRID = list(itertools.product((1, 10, 64, 101), (1, 4, 128), (1, 3, 8)))


def batches_of_ranks(
    samples: int, batch: int, world: int, epoch: int = 0, first_step: int = 0
) -> list[list[RankBatch]]:
    """Return the shares of the epoch for each rank."""
    samplers = [
        GlobalBatchSampler(samples=samples, batch_size=batch, seed=5, rank=rank, world_size=world)
        for rank in range(world)
    ]
    return [list(sampler.batches(epoch, first_step)) for sampler in samplers]


def used(one: RankBatch) -> list[int]:
    return one.indices[: one.count]


@pytest.mark.parametrize(("samples", "batch", "world"), GRID)
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples: int, batch: int, world: int) -> None:
    """Each sample is used once per epoch, and the counts of a step add up to its global count."""
    (single,) = batches_of_ranks(samples, batch, 1)
    assert sorted(index for one in single for index in used(one)) == list(range(samples))
    steps = zip(*batches_of_ranks(samples, batch, world), strict=True)
    for whole, step in zip(single, steps, strict=True):
        assert sorted(index for one in step for index in used(one)) == sorted(used(whole))
        assert {one.global_count for one in step} == {sum(one.count for one in step)}


def test_idle_rank_gets_one_sample_with_weight_0() -> None:
    last = [rank[-1] for rank in batches_of_ranks(22, 5, 3)]
    assert [one.count for one in last] == [1, 1, 0]
    assert len(last[2].indices) == 1


def test_order_depends_on_epoch_and_seed_only() -> None:
    def order(seed: int, epoch: int, **rank: int) -> tuple[int, ...]:
        return tuple(GlobalBatchSampler(samples=50, batch_size=8, seed=seed, **rank).order(epoch))

    assert order(1, 0) == order(1, 0, rank=1, world_size=4)
    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9  # the second epoch of one seed is not the first of the next


def test_epoch_started_in_the_middle_continues_the_whole_one() -> None:
    whole = batches_of_ranks(23, 4, 2, epoch=3)
    assert batches_of_ranks(23, 4, 2, epoch=3, first_step=2)[1] == whole[1][2:]
