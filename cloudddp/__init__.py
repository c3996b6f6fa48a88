"""cloudddp: PyTorch training on N GPU nodes of your own AWS account, in one command, or from Python.

The names of the Python API (cloudddp.api) are loaded when they are first used: the import itself is cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_API = tuple("CloudDDPError Cluster Job JobResult Leftovers Node UsageError attach run sim up".split())


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module("cloudddp.api"), name)
    raise AttributeError(f"module 'cloudddp' has no attribute {name!r}")
