"""Finds the files that cloudddp ships but does not import: `infra/` (for nodes) and `train/` (for users).

In a wheel they are below `cloudddp/_payload/`, in a checkout beside the package.
"""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """Return the folder that contains `infra/` and `train/`."""
    packaged = Path(__file__).parent / "_payload"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent


def text(name: str) -> str:
    """Return the text of one shipped file, named as in the repository: `infra/node/host-key.sh`."""
    return (root() / name).read_text()


def example() -> Path:
    """Return the folder of the example training project."""
    return root() / "train"
