"""Losses and counts of right answers, summed over a batch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812

from train.scores import classify, regress, topk_correct

pytestmark = pytest.mark.torch


def scores(rows: int, classes: int, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + classes)
    return torch.randn(rows, classes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_sum_of_the_losses_of_single_samples(smoothing: float) -> None:
    given, labels = scores(9, 7), torch.arange(9) % 7
    whole = classify(given, labels, smoothing=smoothing)
    single = [
        F.cross_entropy(given[row : row + 1], labels[row : row + 1], label_smoothing=smoothing)
        for row in range(9)
    ]
    assert whole[0].item() == pytest.approx(sum(one.item() for one in single), abs=1e-12)
    assert whole.shape == (3,)
    assert whole.dtype == torch.float64


def test_the_first_entry_carries_the_gradient_and_the_counts_none() -> None:
    given, labels = scores(4, 6), torch.tensor([0, 1, 2, 3])
    (gradient,) = torch.autograd.grad(classify(given, labels)[0], given)
    (expected,) = torch.autograd.grad(F.cross_entropy(given, labels, reduction="sum"), given)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_counts_nowhere(smoothing: float) -> None:
    given, labels = scores(6, 7), torch.tensor([0, -100, 2, 3, -100, 5])
    kept = labels >= 0
    padded = classify(given, labels, smoothing=smoothing)
    assert torch.allclose(
        padded, classify(given[kept], labels[kept], smoothing=smoothing), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_empty_batch_gives_zeros_that_can_be_differentiated(smoothing: float) -> None:
    layer = torch.nn.Linear(3, 10)
    sums = classify(layer(torch.zeros(0, 3)), torch.zeros(0, dtype=torch.long), smoothing=smoothing)
    sums[0].backward()
    assert sums.tolist() == [0.0, 0.0, 0.0]
    assert torch.count_nonzero(layer.weight.grad) == 0


def test_a_batch_of_padding_alone_gives_zeros() -> None:
    given = scores(3, 4)
    sums = classify(given, torch.full((3,), -100), smoothing=0.1)
    sums[0].backward()
    assert sums.tolist() == [0.0, 0.0, 0.0]
    assert torch.count_nonzero(given.grad) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    given, labels = scores(300, 8, dtype=dtype), torch.arange(300) % 8
    sums = classify(given, labels)
    assert sums.dtype == torch.float32
    assert sums[0].item() == pytest.approx(
        F.cross_entropy(given.double(), labels, reduction="sum").item(), rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_targets_of_outputs_in_half_precision_are_not_rounded(dtype: torch.dtype) -> None:
    sums = regress(torch.full((4096, 1), 3.0, dtype=dtype), torch.full((4096, 1), 3.001))
    assert sums.dtype == torch.float32
    assert sums[0].item() == pytest.approx(4096e-6, rel=1e-3)


def test_the_counts_are_those_of_sorting_the_scores() -> None:
    given, labels = scores(50, 12), torch.arange(50) % 12
    ranks = [(row > row[label]).sum().item() for row, label in zip(given, labels, strict=True)]
    expected = [sum(rank < k for rank in ranks) for k in (1, 3, 5)]
    assert topk_correct(given, labels, (1, 3, 5)).tolist() == expected
    assert classify(given, labels)[1:].tolist() == [expected[0], expected[2]]


def test_the_counts_hold_for_tensors_that_are_not_contiguous() -> None:
    # The helper of the walk-throughs calls view on a transposed tensor, and raises here.
    given, labels = scores(6, 40).detach()[:, ::4].T.contiguous().T, torch.arange(12)[::2]
    assert not given.is_contiguous()
    assert not labels.is_contiguous()
    expected = topk_correct(given.contiguous(), labels.contiguous(), (1, 5))
    assert torch.equal(topk_correct(given, labels, (1, 5)), expected)


def test_with_fewer_than_five_classes_every_labelled_row_is_within_five_guesses() -> None:
    given, labels = scores(8, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, -100])
    assert topk_correct(given, labels, (1, 5))[1].item() == 7


def test_squared_error_is_summed_and_pairs_targets_with_their_outputs() -> None:
    outputs = torch.tensor([[1.0], [2.0], [4.0]], requires_grad=True)
    for targets in (torch.tensor([[0.0], [2.0], [1.0]]), torch.tensor([0.0, 2.0, 1.0])):
        assert regress(outputs, targets).tolist() == [10.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(regress(outputs, targets)[0], outputs)
    assert gradient.flatten().tolist() == [2.0, 0.0, 6.0]


def test_squared_error_of_an_empty_batch_is_zero_and_can_be_differentiated() -> None:
    layer = torch.nn.Linear(20, 1)
    sums = regress(layer(torch.zeros(0, 20)), torch.zeros(0, 1))
    sums[0].backward()
    assert sums.tolist() == [0.0, 0.0, 0.0]
    assert torch.count_nonzero(layer.weight.grad) == 0
