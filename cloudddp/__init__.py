"""cloudddp: PyTorch training on N GPU nodes of your own AWS account, in one command, or from Python.

The names of the Python API (cloudddp.api) are loaded when they are first used, so that importing this is cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    api = import_module("cloudddp.api") if not name.startswith("_") else None
    if name in getattr(api, "__all__", ()):
        return getattr(api, name)
    raise AttributeError(f"module 'cloudddp' has no attribute {name!r}")
