"""The imports of `train/`: no cycles, and nothing of the launcher."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TRAIN = Path(__file__).resolve().parents[2] / "train"


def module_name(path: Path) -> str:
    parts = path.relative_to(TRAIN.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[str]:
    """Yield the absolute names that a file imports anywhere, also inside functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(paths: dict[str, Path]) -> dict[str, set[str]]:
    """Return module -> the modules among `paths` that it imports. Packages count only where a name is taken
    from their __init__.py."""
    return {module: {*imported_names(path)} & paths.keys() - {"train"} for module, path in paths.items()}


def package_graph(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return package -> the other packages that its modules import: train.data and so on, and each module of
    train/ itself as a package of its own."""
    packages: dict[str, set[str]] = {}
    for module, imported in modules.items():
        name = package_name(module)
        packages.setdefault(name, set()).update({package_name(one) for one in imported} - {name})
    return packages


def package_name(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("unit", ["modules", "packages"])
def test_train_has_no_import_cycles(unit: str) -> None:
    graph = import_graph({module_name(path): path for path in TRAIN.rglob("*.py")})
    try:
        TopologicalSorter(graph if unit == "modules" else package_graph(graph)).prepare()
    except CycleError as error:
        # graphlib gives each one before the one that imports it.
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_train_imports_nothing_of_the_launcher() -> None:
    for path in TRAIN.rglob("*.py"):
        packages = {name.split(".")[0] for name in imported_names(path)}
        assert not packages & {"cloudddp", "infra"}, path
