"""Losses and metrics, summed over a batch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812

from train.checkpoint.best import BestWeights
from train.config import make
from train.data.readers import open_reader
from train.errors import UsageError
from train.flags import DataFlags
from train.task import Task, classification, first_part, next_token, regression

pytestmark = pytest.mark.torch


def sums(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return [loss, samples, correct, rows, correct in top 5, rows] of a classification, [loss, samples] of a
    regression."""
    return task.sums(outputs, (None, targets))


def classified(scores: torch.Tensor, labels: torch.Tensor, *, smoothing: float = 0.0) -> torch.Tensor:
    return sums(classification(smoothing=smoothing), scores, labels)


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return sums(regression(), outputs, targets)


def random_scores(rows: int, classes: int, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + classes)
    return torch.randn(rows, classes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_sum_over_single_samples(smoothing: float) -> None:
    scores, labels = random_scores(9, 7), torch.arange(9) % 7
    whole = classified(scores, labels, smoothing=smoothing)
    single = [
        F.cross_entropy(scores[row : row + 1], labels[row : row + 1], label_smoothing=smoothing)
        for row in range(9)
    ]
    assert whole[0].item() == pytest.approx(sum(one.item() for one in single), abs=1e-12)
    assert whole.tolist()[1::2] == [9, 9, 9]
    assert whole.dtype == torch.float64


def test_only_the_loss_carries_a_gradient() -> None:
    scores, labels = random_scores(4, 6), torch.tensor([0, 1, 2, 3])
    (gradient,) = torch.autograd.grad(classified(scores, labels)[0], scores)
    (expected,) = torch.autograd.grad(F.cross_entropy(scores, labels, reduction="sum"), scores)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_labels_count_nowhere(smoothing: float) -> None:
    scores, labels = random_scores(6, 7), torch.tensor([0, -100, 2, 3, -100, 5])
    kept = labels >= 0
    padded = classified(scores, labels, smoothing=smoothing)
    expected = classified(scores[kept], labels[kept], smoothing=smoothing)
    assert torch.allclose(padded[::2], expected[::2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_empty_batch_gives_differentiable_zeros(smoothing: float) -> None:
    layer = torch.nn.Linear(3, 10)
    totals = classified(layer(torch.zeros(0, 3)), torch.zeros(0, dtype=torch.long), smoothing=smoothing)
    totals[0].backward()
    assert totals.tolist() == [0.0] * len(totals)
    assert torch.count_nonzero(layer.weight.grad) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    scores, labels = random_scores(300, 8, dtype=dtype), torch.arange(300) % 8
    totals = classified(scores, labels)
    assert totals.dtype == torch.float32
    assert totals[0].item() == pytest.approx(
        F.cross_entropy(scores.double(), labels, reduction="sum").item(), rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_regression_targets_are_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    totals = squared(torch.full((4096, 1), 3.0, dtype=dtype), torch.full((4096, 1), 3.001))
    assert totals.dtype == torch.float32
    assert totals[0].item() == pytest.approx(4096e-6, rel=1e-3)


def test_topk_counts_equal_those_of_sorted_scores() -> None:
    scores, labels = random_scores(50, 12), torch.arange(50) % 12
    positions = [(row > row[label]).sum().item() for row, label in zip(scores, labels, strict=True)]
    expected = [sum(position < k for position in positions) for k in (1, 5)]
    assert classified(scores, labels)[2:].tolist() == [expected[0], 50, expected[1], 50]


def test_topk_accepts_non_contiguous_tensors() -> None:
    # The usual helper of tutorials calls view on a transposed tensor, and raises here.
    scores, labels = random_scores(6, 40).detach()[:, ::4].T.contiguous().T, (torch.arange(12) % 10)[::2]
    assert not scores.is_contiguous()
    assert not labels.is_contiguous()
    expected = classified(scores.contiguous(), labels.contiguous())
    assert torch.equal(classified(scores, labels), expected)


def test_top5_counts_every_labelled_row_with_fewer_than_five_classes() -> None:
    scores, labels = random_scores(8, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, -100])
    assert classified(scores, labels)[4].item() == 7


def test_squared_error_pairs_targets_with_outputs() -> None:
    outputs = torch.tensor([[1.0], [2.0], [4.0]], requires_grad=True)
    for targets in (torch.tensor([[0.0], [2.0], [1.0]]), torch.tensor([0.0, 2.0, 1.0])):
        assert squared(outputs, targets).tolist() == [10.0, 3.0]
    (gradient,) = torch.autograd.grad(squared(outputs, targets)[0], outputs)
    assert gradient.flatten().tolist() == [2.0, 0.0, 6.0]


def test_accuracy_of_tokens_is_a_share_of_tokens_and_the_loss_one_of_samples() -> None:
    scores = torch.zeros(2, 3, 5)
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    for row, tokens in enumerate(targets.tolist()):
        for place, token in enumerate(tokens[:2]):  # the last one is wrong
            scores[row, place, token] = 9.0
        scores[row, 2, 1] = 9.0
    task = next_token()
    totals = sums(task, scores, targets)
    assert totals.tolist()[1:] == [2.0, 4.0, 6.0]
    assert task.figures(totals)["accuracy"] == pytest.approx(4 / 6)
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").view(2, 3).mean(1)
    assert totals[0].item() == pytest.approx(expected.sum().item())


def test_loss_that_is_no_number_per_sample_is_explained() -> None:
    task = Task(loss=lambda outputs, _batch: outputs.sum(), metrics={}, forward=first_part)
    with pytest.raises(UsageError, match="one number per sample"):
        sums(task, torch.zeros(3, 2), torch.zeros(3))


@pytest.mark.parametrize(
    ("returned", "found"), [(torch.zeros(()), r"one of the shape \(\)"), ((3, 4), r"\(3, 4\)"), (0.5, "0.5")]
)
def test_metric_that_is_no_sum_and_count_is_explained(returned: object, found: str) -> None:
    task = Task(loss=lambda outputs, _batch: outputs.sum(1), metrics={"hits": lambda *_: returned})
    with pytest.raises(
        UsageError, match=rf"the metric hits must return a tensor \[sum, count\], but returned {found}"
    ):
        sums(task, torch.zeros(3, 2), torch.zeros(3))


def test_best_metric_that_does_not_exist_is_that_of_the_flag_or_of_the_task() -> None:
    task = Task(loss=lambda outputs, _batch: outputs.sum(1), metrics={}, best="acc")
    with pytest.raises(UsageError, match=r"^the best metric of the task, acc: must be one of loss$"):
        BestWeights(make(), task)
    with pytest.raises(UsageError, match=r"^--best-metric top5: must be one of loss$"):
        BestWeights(make(best_metric="top5"), task)


def test_steps_per_epoch_of_data_with_a_length_are_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8))
    with pytest.raises(UsageError, match="--steps-per-epoch has no effect on TensorDataset"):
        open_reader(data, DataFlags(steps_per_epoch=3), batch_size=2, seed=0, rank=0, world_size=1)
