"""Losses and counts of correct predictions: sums over a batch, as tensors on its device.

Sums and not means, because ranks may hold different numbers of samples; nothing here waits for the device. For
another kind of task, write a function like `classification` here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor

HALF_PRECISION = (torch.float16, torch.bfloat16)


def classification(scores: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return [summed cross-entropy, correct, correct in top 5] of scores [n, classes] and int64 labels [n].

    Labels of -100 are ignored, as in cross_entropy. The first entry carries the gradient, also for an empty batch,
    where it is 0. The dtype is that of the scores, but float32 for half precision.
    """
    if scores.dtype in HALF_PRECISION:
        scores = scores.float()
    loss = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
    return torch.cat([loss[None], topk_correct(scores.detach(), labels, (1, 5)).to(loss.dtype)])


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [summed squared error, 0, 0] of outputs and targets with the same number of elements.

    The first entry carries the gradient. The dtype is that of the outputs, but float32 for half precision.
    """
    if outputs.dtype in HALF_PRECISION:
        outputs = outputs.float()
    # Outputs [n, 1] minus targets [n] would silently broadcast to [n, n].
    loss = (outputs - targets.reshape(outputs.shape).to(outputs.dtype)).square().sum()
    return torch.cat([loss[None], loss.new_zeros(2)])


def topk_correct(scores: Tensor, labels: Tensor, ks: Sequence[int]) -> Tensor:
    """Return for each k in how many rows of scores [n, classes] the label is among the k highest: int64 [len(ks)].

    With fewer than k classes that is every row whose label is a class.
    """
    largest = min(max(ks), scores.shape[1])
    hits = scores.topk(largest, dim=1).indices == labels[:, None]
    return torch.stack([hits[:, :k].sum() for k in ks])
