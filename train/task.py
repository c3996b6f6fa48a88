"""Tasks: how a model is applied to a batch, its loss, and the metrics that are reported. For another kind of
task, write one here, or beside your dataset.

A batch is a tensor, or tuples, lists and dictionaries of tensors, whose first dimension is the samples. A
loss is one number per sample, and a metric a sum with the number of things it counts (samples, or tokens):
ranks hold different numbers of both. Nothing here waits for the device; `new_tensor` would, to copy its
number there, and `new_full` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from train.errors import UsageError

Batch = Any
Outputs = Any
HALF_PRECISION = (torch.float16, torch.bfloat16)


def first_part(model: nn.Module, batch: Batch) -> Outputs:
    """Apply the model to the first part of the batch: the inputs of (inputs, labels). Raises `UsageError` for
    a dictionary."""
    if isinstance(batch, Mapping):
        raise UsageError(
            f"batches are dictionaries ({', '.join(map(str, batch))}): give the task a function `forward`"
        )
    return model(batch[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learned from a batch.

    `loss` gets the outputs of the model and the batch, and returns a loss per sample, [n]; training minimizes
    its mean over the global batch. `metrics` return [sum, count]; their values are sum / count over all
    ranks. `best` names the metric, or loss, whose best value decides which weights are kept; `larger` says
    whether a larger value is better. `forward` applies the model to a batch; pipelines need `first_part`.
    """

    loss: Callable[[Outputs, Batch], Tensor]
    metrics: Mapping[str, Callable[[Outputs, Batch], Tensor]] = field(default_factory=dict)
    best: str = "loss"
    larger: bool = False
    forward: Callable[[nn.Module, Batch], Outputs] = first_part

    @property
    def names(self) -> tuple[str, ...]:
        """What `sums` counts, in its order."""
        return ("loss", *self.metrics)

    def sums(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return [2 + 2 m]: the summed loss, which carries the gradient, the samples, and each metric's sum
        and count."""
        losses = self.loss(outputs, batch)
        if losses.dim() != 1:
            raise UsageError(
                f"the loss must be one number per sample, but has the shape {tuple(losses.shape)}"
            )
        total = losses.sum()
        count = total.new_full((1,), len(losses))
        with torch.no_grad():
            figures = [_sum_and_count(name, metric(outputs, batch)) for name, metric in self.metrics.items()]
        return torch.cat([total[None], count, *(figure.to(total) for figure in figures)])

    def figures(self, sums: Tensor) -> dict[str, float]:
        """Return the means that `sums`, added up over steps and ranks, stand for, by name."""
        values = sums.tolist()
        return {name: values[2 * k] / (values[2 * k + 1] or 1.0) for k, name in enumerate(self.names)}


def classification(*, smoothing: float = 0.0) -> Task:
    """Return the task of predicting int64 labels [n] by scores [n, classes]. A sample with the label -100 has
    no loss and is not correct."""
    return Task(
        loss=partial(cross_entropy, smoothing=smoothing),
        metrics={"accuracy": partial(top, k=1), "top5": partial(top, k=5)},
        best="accuracy",
        larger=True,
    )


def regression() -> Task:
    """Return the task of predicting targets by outputs with the same number of elements: the summed squared
    error."""
    return Task(loss=squared_error)


def next_token(*, smoothing: float = 0.0) -> Task:
    """Return the task of predicting the tokens [n, length] of (inputs, targets) by scores [n, length,
    tokens]; the loss of a sample is the mean over its tokens."""
    return Task(
        loss=partial(token_loss, smoothing=smoothing),
        metrics={"accuracy": of_tokens},
        best="loss",
    )


def _sum_and_count(name: str, figure: Any) -> Tensor:
    """Return what a metric has returned, if that can be added up. Raises `UsageError`."""
    if not isinstance(figure, Tensor) or figure.shape != (2,):
        found = f"one of the shape {tuple(figure.shape)}" if isinstance(figure, Tensor) else f"{figure!r:.40}"
        raise UsageError(f"the metric {name} must return a tensor [sum, count], but returned {found}")
    return figure


# -- losses: a number for each sample [n] ------------------------------------------------------------------


def cross_entropy(scores: Tensor, batch: Any, *, smoothing: float) -> Tensor:
    """Return the loss of scores [n, classes] for int64 labels [n]; 0 where the label is -100."""
    return F.cross_entropy(_exact(scores), batch[1], reduction="none", label_smoothing=smoothing)


def squared_error(outputs: Tensor, batch: Any) -> Tensor:
    """Return the squared error of outputs and targets with the same number of elements, summed over those of
    a sample."""
    outputs = _exact(outputs)
    # Outputs [n, 1] minus targets [n] would silently broadcast to [n, n].
    errors: Tensor = outputs - batch[1].reshape(outputs.shape).to(outputs.dtype)
    return errors.square().flatten(1).sum(1)


def token_loss(scores: Tensor, batch: Any, *, smoothing: float) -> Tensor:
    """Return the mean loss over the tokens of each sample, of scores [n, length, tokens] for int64 targets
    [n, length]."""
    losses = F.cross_entropy(
        _exact(scores).flatten(0, 1), batch[1].flatten(), reduction="none", label_smoothing=smoothing
    )
    return losses.view(batch[1].shape).mean(1)


def _exact(outputs: Tensor) -> Tensor:
    """Return float32 instead of half precision."""
    return outputs.float() if outputs.dtype in HALF_PRECISION else outputs


# -- how many predictions are right: [right ones, predictions] ---------------------------------------------


def top(scores: Tensor, batch: Any, *, k: int) -> Tensor:
    """Return in how many rows the label is among the k highest scores (with fewer classes: in every row whose
    label is a class), and the number of rows."""
    labels = batch[1]
    hits = scores.topk(min(k, scores.shape[1]), dim=1).indices == labels[:, None]
    return torch.stack([hits.sum(), hits.new_full((), len(labels), dtype=torch.int64)])


def of_tokens(scores: Tensor, batch: Any) -> Tensor:
    """Return for how many tokens the highest score is that of the target, and the number of tokens."""
    hits = scores.argmax(-1) == batch[1]
    return torch.stack([hits.sum(), hits.new_full((), hits.numel(), dtype=torch.int64)])


# -- batches -----------------------------------------------------------------------------------------------


def part(values: Any, begin: int, end: int) -> Any:
    """Return the samples begin..end of a batch, or of outputs."""
    return pytree.tree_map(lambda value: value[begin:end] if _has_samples(value) else value, values)


def first(values: Any, count: int) -> Any:
    """Return the first `count` samples of a batch, or of outputs."""
    return part(values, 0, count)


def device_of(values: Any) -> torch.device | None:
    """Return the device of the first tensor; None if there is none."""
    return next((value.device for value in pytree.tree_leaves(values) if isinstance(value, Tensor)), None)


def to_device(batch: Batch, device: torch.device | None) -> Batch:
    """Return the batch with its tensors on `device`. From pinned memory the host does not wait for the
    copy."""
    if device is None:
        return batch
    return pytree.tree_map(
        lambda value: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value, batch
    )


def size(batch: Batch) -> int:
    """Return the number of samples. Raises `ValueError` for a batch without a tensor."""
    for value in pytree.tree_leaves(batch):
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    raise ValueError("a batch must hold a tensor whose first dimension is the samples")


def on_inputs(change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    """Return a function that changes the inputs of batches (inputs, labels)."""
    return lambda batch: (change(batch[0]), *batch[1:])


def _has_samples(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
