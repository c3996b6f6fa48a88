"""Finds the files that cloudddp ships but does not import: `infra/` for nodes, and the examples for users.

In a wheel they are below `cloudddp/_payload/`, in a checkout beside the package. Examples are found by
patterns: nothing here depends on the names of their modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

# Per example: the folders whose content becomes the project, and the files below them, by pattern.
_EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "ddp": [("examples/ddp", "**/*")],
    "trainer": [
        ("examples/trainer", "**/*"),
        ("", "train/**/*"),
        *(("", f"docs/{name}.md") for name in ("training", "trainer", "pipelines", "smddp")),
    ],
}
EXAMPLES = tuple(_EXAMPLES)
# What running an example leaves in a checkout.
_NOT_COPIED = ("__pycache__", "runs", "results", ".*")


def root() -> Path:
    """Return the folder that contains `infra/`, `train/` and `examples/`."""
    packaged = Path(__file__).parent / "_payload"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent


def text(name: str) -> str:
    """Return the text of one shipped file, named as in the repository: `infra/node/host-key.sh`."""
    return (root() / name).read_text()


def example(name: str) -> dict[str, Path]:
    """Return the files of an example, by their paths in the project that is made from it."""
    found: dict[str, Path] = {}
    for folder, pattern in _EXAMPLES[name]:
        base = root() / folder
        for path in sorted(base.glob(pattern)):
            parts = path.relative_to(base).parts
            if path.is_file() and not any(fnmatch(part, one) for part in parts for one in _NOT_COPIED):
                found["/".join(parts)] = path
    return found
