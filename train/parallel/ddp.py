"""--parallel ddp: every rank holds the whole model, and the gradients are averaged after each backward
pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.errors import TrainError
from train.parallel.layers import buffers_preserved
from train.parallel.strategy import Part, Strategy, explained
from train.task import Batch, size


class DDPStrategy(Strategy):
    """Every rank holds the whole model and takes its share of each batch."""

    _warm = False

    def _wrap(self, module: nn.Module) -> nn.Module:
        """Return the module with its gradients averaged over all ranks after each backward pass."""
        flags = self.config.parallel
        if self.config.precision.compile:
            module = self._compile(module)
        if not self.comm.info.distributed:
            return module
        return DistributedDataParallel(
            module,
            device_ids=self._device_ids(),
            bucket_cap_mb=flags.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=flags.static_graph,
            find_unused_parameters=flags.find_unused_parameters,
        )

    def _device_ids(self) -> list[int] | None:
        device = self.comm.device
        return [device.index] if device.type == "cuda" else None

    def train_batch(self, parts: Sequence[Part], *, global_count: int) -> Tensor:
        """As in the base class. Raises `TrainError` where the loss does not depend on all parameters, which
        DDP has to know."""
        if self.comm.world_size > 2 and not self._warm:
            self._warm_up_buckets(parts[-1][0])
        sums = super().train_batch(parts, global_count=global_count)
        self._check_unused()
        return sums

    def _warm_up_buckets(self, batch: Batch) -> None:
        """Bring DDP's gradient buckets into their final order, which they otherwise take after the first
        step.

        The order of additions follows the buckets. A resumed run would add in the first order where the
        uninterrupted one added in the second; with three ranks or more the sums then differ in their last
        bits.
        """
        self._warm = True
        device = self.comm.device
        devices = [device] if device.type == "cuda" else []
        with buffers_preserved(self.module), torch.random.fork_rng(devices=devices):
            for _ in range(2):
                with explained():
                    (self._forward(self.model, batch, size(batch))[0] * 0).backward()
                self._check_unused()
        for _, parameter in self._trained:
            parameter.grad = None

    def _check_unused(self) -> None:
        # DDP itself notices it one step later: until then the weights of the ranks would already differ.
        if not isinstance(self.model, DistributedDataParallel) or self.config.parallel.find_unused_parameters:
            return
        unused = [name for name, parameter in self._trained if parameter.grad is None]
        if unused:
            names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} others" if len(unused) > 3 else "")
            raise TrainError(
                f"the loss does not depend on {names}: give --find-unused-parameters if that differs from "
                "step to step, else remove these layers or --freeze them"
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does not reduce gradients, for all parts of a batch but the last."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()
