"""Where the files are that cloudddp ships but does not import: `infra/` (to nodes) and `train/` (to users).

In a wheel they lie under `cloudddp/_payload/`, in a checkout beside the package. Nobody else needs to know.
"""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """Return the folder that holds `infra/` and `train/`."""
    packaged = Path(__file__).parent / "_payload"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent


def text(name: str) -> str:
    """Return the text of one shipped file, named as in the repository: `infra/node/agent.py`."""
    return (root() / name).read_text()


def example() -> Path:
    """Return the folder of the example training project."""
    return root() / "train"
