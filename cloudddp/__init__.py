"""cloudddp: PyTorch training on N GPU nodes of your own AWS account, in one command, or from Python
(cloudddp.api).

The names of the Python API are loaded when they are first used, so that importing this package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cloudddp.api import (
        CloudDDPError,
        Cluster,
        Job,
        JobResult,
        Leftovers,
        Node,
        UsageError,
        attach,
        run,
        sim,
        up,
    )

__all__ = [
    "CloudDDPError",
    "Cluster",
    "Job",
    "JobResult",
    "Leftovers",
    "Node",
    "UsageError",
    "__version__",
    "attach",
    "run",
    "sim",
    "up",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("cloudddp.api"), name)
    raise AttributeError(f"module 'cloudddp' has no attribute {name!r}")
