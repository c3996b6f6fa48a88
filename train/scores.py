"""How good the outputs of a model are: sums over a batch, as tensors on its device.

Sums and not means, because ranks may hold different numbers of samples; nothing here waits for the device. It must
not know models, ranks or steps. For another kind of task, write a function like `classify` here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def classify(scores: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """[summed cross-entropy, right at first guess, right within five guesses] of scores [n, classes] and int64
    labels [n]. Labels of -100 count nowhere, as in cross_entropy.

    The first entry carries the gradient, also for an empty batch, where it is 0. Its type is that of the scores,
    but float32 for half precision.
    """
    if scores.dtype in HALF:
        scores = scores.float()
    loss = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
    return torch.cat([loss[None], topk_correct(scores.detach(), labels, (1, 5)).to(loss.dtype)])


def regress(outputs: Tensor, targets: Tensor) -> Tensor:
    """[summed squared error, 0, 0] of outputs and targets of as many elements; the first carries the gradient. Its
    type is that of the outputs, but float32 for half precision."""
    if outputs.dtype in HALF:
        outputs = outputs.float()
    # Outputs [n, 1] minus targets [n] would be [n, n], without a word.
    loss = (outputs - targets.reshape(outputs.shape).to(outputs.dtype)).square().sum()
    return torch.cat([loss[None], loss.new_zeros(2)])


def topk_correct(scores: Tensor, labels: Tensor, ks: Sequence[int]) -> Tensor:
    """For each k, in how many rows of scores [n, classes] the label is among the k highest: int64 [len(ks)].

    With fewer than k classes that is every row whose label is a class.
    """
    most = min(max(ks), scores.shape[1])
    hits = scores.topk(most, dim=1).indices == labels[:, None]
    return torch.stack([hits[:, :k].sum() for k in ks])
