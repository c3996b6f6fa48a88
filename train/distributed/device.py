"""The device of a rank, and its numerical settings."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TypeVar

import torch
from torch import nn

from train.config import Config
from train.distributed.rank_info import RankInfo
from train.errors import UsageError

M = TypeVar("M", bound=nn.Module)


def select_device(config: Config, info: RankInfo) -> torch.device:
    """Return the device of this rank; for --parallel pipeline the first of two consecutive ones.

    Raises `UsageError` where the node has fewer GPUs than its ranks need.
    """
    if config.precision.device == "cpu" or (
        config.precision.device == "auto" and not torch.cuda.is_available()
    ):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("--device cuda: torch finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    per_rank = 2 if config.parallel.parallel == "pipeline" else 1
    # A launcher may show each rank its own GPUs only; then they begin at 0 whatever the local rank.
    if count == per_rank and "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.device("cuda", 0)
    # By local rank and not by rank: on the second node these differ.
    index = per_rank * info.local_rank
    if index + per_rank <= count:
        return torch.device("cuda", index)
    if per_rank == 1:
        raise UsageError(
            f"no GPU for local rank {info.local_rank}: this node has {count}; start at most {count} ranks "
            "per node"
        )
    raise UsageError(
        f"--parallel pipeline takes two GPUs per process: local rank {info.local_rank} needs "
        f"{index + per_rank} GPUs on this node, which has {count}; start with --nproc-per-node = GPUs / 2"
        + (f", here {count // per_rank}" if count >= per_rank else ", or give --device cpu")
    )


def set_numerics(config: Config) -> None:
    """Set TF32, cuDNN's autotuning and deterministic algorithms for the process."""
    torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision.tf32
    torch.backends.cudnn.benchmark = not config.precision.deterministic
    if not config.precision.deterministic:
        return
    # cuBLAS is deterministic only with a fixed workspace, chosen before its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors, on the CPU of Linux.

    By default it returns that memory to the system and fetches it again at the next allocation, page by page:
    up to a quarter of the time of a step of the MNIST model (200,000 page faults in 60 steps of 64 images).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**25)  # the largest value that glibc accepts


def move(module: M, device: torch.device, *, channels_last: bool) -> M:
    """Move `module` to `device`, with its weights in the channels_last memory format if asked."""
    module = module.to(device)
    return module.to(memory_format=torch.channels_last) if channels_last else module
