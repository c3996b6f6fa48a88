"""Losses: a number for each sample [n], from the outputs of a model and its batch (inputs, labels)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor

HALF_PRECISION = (torch.float16, torch.bfloat16)


def cross_entropy(scores: Tensor, batch: Any, *, smoothing: float) -> Tensor:
    """Return the loss of scores [n, classes] for int64 labels [n]; 0 where the label is -100."""
    return F.cross_entropy(_exact(scores), batch[1], reduction="none", label_smoothing=smoothing)


def squared_error(outputs: Tensor, batch: Any) -> Tensor:
    """Return the squared error of outputs and targets with the same number of elements, summed over those of a sample."""
    outputs = _exact(outputs)
    # Outputs [n, 1] minus targets [n] would silently broadcast to [n, n].
    errors: Tensor = outputs - batch[1].reshape(outputs.shape).to(outputs.dtype)
    return errors.square().flatten(1).sum(1)


def token_loss(scores: Tensor, batch: Any, *, smoothing: float) -> Tensor:
    """Return the mean loss over the tokens of each sample, of scores [n, length, tokens] for int64 targets [n, length]."""
    losses = F.cross_entropy(
        _exact(scores).flatten(0, 1), batch[1].flatten(), reduction="none", label_smoothing=smoothing
    )
    return losses.view(batch[1].shape).mean(1)


def _exact(outputs: Tensor) -> Tensor:
    """Return float32 instead of half precision."""
    return outputs.float() if outputs.dtype in HALF_PRECISION else outputs
