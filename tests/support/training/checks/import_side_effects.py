"""Checks what importing `train` and running it changes for the process: `import_side_effects.py FOLDER`."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys

import torch.distributed
from support.training.launch import ROOT

for name in [name for name in sys.modules if name.split(".")[0] == "train"]:
    del sys.modules[name]  # imported before the fork

sigterm = signal.getsignal(signal.SIGTERM)
names = [module.name for module in pkgutil.walk_packages([str(ROOT / "train")], "train.")]
modules = {name.removeprefix("train."): importlib.import_module(name) for name in names}
assert multiprocessing.get_start_method(allow_none=True) is None
assert signal.getsignal(signal.SIGTERM) is sigterm

config, process_group, rank_info = (
    modules[name] for name in ("config", "distributed.process_group", "distributed.rank_info")
)
main = modules["main"].main
try:
    with process_group.join(config.make(parallel="fsdp"), rank_info.RankInfo()):
        assert torch.distributed.is_initialized()
        raise KeyError("anything")
except KeyError:
    assert not torch.distributed.is_initialized()

flags = [
    "--dataset",
    "synthetic",
    "--synthetic-size=8",
    "--epochs=1",
    "--no-tensorboard",
    "--out",
    sys.argv[1],
]
assert main(flags) == 0
assert torch.get_float32_matmul_precision() == "high"
assert torch.backends.cudnn.allow_tf32
assert torch.backends.cudnn.benchmark
assert not torch.are_deterministic_algorithms_enabled()
assert main([*flags, "--fresh", "--deterministic", "--no-tf32"]) == 0
assert torch.get_float32_matmul_precision() == "highest"
assert not torch.backends.cudnn.allow_tf32
assert torch.are_deterministic_algorithms_enabled()
assert not torch.backends.cudnn.benchmark
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
modules["process_exit"].exit_process(0)
