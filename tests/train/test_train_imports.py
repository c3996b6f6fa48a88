"""The imports of `train/`: no cycles between modules or packages, and nothing of the launcher."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TRAIN = Path(__file__).resolve().parents[2] / "train"


def imported_names(path: Path) -> Iterator[str]:
    """Yield the absolute names that a file imports anywhere, also inside functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


@pytest.mark.parametrize("parts", [9, 2], ids=["modules", "packages"])
def test_train_has_no_import_cycles(parts: int) -> None:
    """Packages: train.data and so on, and each module of train/ itself as a package of its own."""
    paths = {
        ".".join(path.relative_to(TRAIN.parent).with_suffix("").parts): path for path in TRAIN.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        imported = {*imported_names(path)} & modules.keys() - {"train"}
        unit, *others = (".".join(name.split(".")[:parts]) for name in (module, *imported))
        graph.setdefault(unit, set()).update({*others} - {unit})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # graphlib gives each one before the one that imports it.
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_train_imports_nothing_of_the_launcher() -> None:
    for path in TRAIN.rglob("*.py"):
        packages = {name.split(".")[0] for name in imported_names(path)}
        assert not packages & {"cloudddp", "infra"}, path
