"""How many predictions are right: [right ones, predictions], as metrics of a task return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def top(scores: Tensor, batch: Any, *, k: int) -> Tensor:
    """Return in how many rows the label is among the k highest scores (with fewer classes: in every row whose label is a
    class), and the number of rows."""
    labels = batch[1]
    hits = scores.topk(min(k, scores.shape[1]), dim=1).indices == labels[:, None]
    return torch.stack([hits.sum(), hits.new_full((), len(labels), dtype=torch.int64)])


def of_tokens(scores: Tensor, batch: Any) -> Tensor:
    """Return for how many tokens the highest score is that of the target, and the number of tokens."""
    hits = scores.argmax(-1) == batch[1]
    return torch.stack([hits.sum(), hits.new_full((), hits.numel(), dtype=torch.int64)])
