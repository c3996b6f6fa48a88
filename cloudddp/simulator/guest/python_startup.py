"""Runs at the start of every Python on a simulated node, as its `sitecustomize`: the node's GPUs and its cold
disk.

- A process with CLOUDDDP_GPU_CHECK in its environment imports a stand-in for torch that has the GPUs of the
  instance type. Everywhere else PyTorch sees none, so that jobs use gloo.
- The first import of torch on a node is as slow as the condition `boot` says. A volume is read from its
  snapshot when a block is first used, so on AWS that import can take minutes.
- On a namespace node, which reaches no package index, pip does not try again and again.

Standalone, because it is copied to the node.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib takes 10 ms, which every Python would
_FOLDERS = (_HERE, "/run/cloudddp")  # of a process node, of a namespace node
_IMPORTED = os.path.join(os.environ.get("TMPDIR", "/var/tmp"), ".torch-was-imported")  # noqa: PTH118, S108


def main() -> None:
    if __file__.startswith("/usr/"):  # of a namespace node
        _report_missing_index()
    if _read("cold") and not os.path.exists(_IMPORTED):  # noqa: PTH110
        sys.meta_path.insert(0, _ColdDisk())
    if os.environ.get("CLOUDDDP_GPU_CHECK") and _has_torch():
        _install_stand_in()


def _report_missing_index() -> None:
    """Print once why pip cannot install: without this it tries five times, for a minute."""
    words = sys.orig_argv[1:]
    is_pip = "pip" in words[:2] or any(os.path.basename(word).startswith("pip") for word in words[:1])  # noqa: PTH119
    if is_pip and "install" in words and not {"--no-index", "-e", "--editable"} & set(words):
        os.environ.setdefault("PIP_RETRIES", "0")
        sys.stderr.write(
            "simulated node: there is no package index here, so pip installs nothing new; "
            "[setup] wheels names a folder of wheels\n"
        )


def _read(name: str) -> str:
    for folder in _FOLDERS:
        try:
            with open(os.path.join(folder, name)) as file:  # noqa: PTH118, PTH123
                return file.read()
        except OSError:
            continue
    return ""


class _ColdDisk:
    """Delays the import of torch until one import on this node has been completed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch":
            _read_torch()


def _read_torch() -> None:
    """Take as long as reading torch from the disk does. Processes that begin at the same time are all
    slow."""
    import time

    seconds = _read("cold")
    if seconds and not os.path.exists(_IMPORTED):  # noqa: PTH110
        time.sleep(float(seconds))
        with open(_IMPORTED, "w"):  # noqa: PTH123
            pass


def _has_torch() -> bool:
    from importlib.machinery import PathFinder

    return PathFinder.find_spec("torch") is not None


def _install_stand_in() -> None:
    import json
    from types import ModuleType

    facts = json.loads(_read("node.json") or "{}")
    count = len(facts.get("gpus", []))
    boot = facts.get("boot", {})
    usable = max(count - int(boot.get("failed_gpus", 0)) - int(boot.get("unusable_gpus", 0)), 0)

    def zeros(*_: object, device: str) -> None:
        if int(device.partition(":")[2]) >= usable:
            raise RuntimeError("CUDA error: device is lost (simulated)")

    torch: Any = ModuleType("torch")
    distributed: Any = ModuleType("torch.distributed")
    cuda: Any = ModuleType("torch.cuda")
    cuda.device_count, cuda.synchronize = lambda: count, lambda _device: None
    torch.cuda, torch.distributed, torch.zeros, torch.__path__ = cuda, distributed, zeros, []
    distributed.run, distributed.__path__ = ModuleType("torch.distributed.run"), []
    for module in (torch, cuda, distributed, distributed.run):
        sys.modules[module.__name__] = module
    _read_torch()


if __name__ == "sitecustomize":
    main()
