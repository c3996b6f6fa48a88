"""No module of cloudddp or of the agent imports itself through others, also not within a function."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imports(folder: Path) -> dict[str, set[str]]:
    """Return the modules below a package's folder, each with those that its imports name anywhere."""
    files = {name(path, folder): path for path in folder.rglob("*.py")}
    return {module: set(named(path, module)) & files.keys() - {module} for module, path in files.items()}


def name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named(path: Path, module: str) -> Iterator[str]:
    """Yield what a module imports. `from a.b import c` needs a.b, and a.b.c if that is a module."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle, or []."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", ["cloudddp", "infra/node/agent"])
def test_imports_form_no_circle(package: str) -> None:
    graph = imports(ROOT / package)
    assert len(graph) > 10
    assert circle(graph) == []


def test_circle_through_a_package_and_a_function_is_found(tmp_path: Path) -> None:
    """So that the test above can fail."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.one import f\n")
    (package / "one.py").write_text("from .two import g\n")
    (package / "two.py").write_text("def g():\n    import package.three\n")
    (package / "three.py").write_text("if TYPE_CHECKING:\n    from package import f\n")
    assert circle(imports(package))
    (package / "three.py").write_text("")
    assert circle(imports(package)) == []


# Contract -> its list, and the modules of cloudddp that are not in it.
NOT_IN = {
    "boto": ("source_modules", {"aws", "simulator"}),
    "paramiko": ("source_modules", {"ssh"}),
    "moto": ("source_modules", {"__main__", "cli", "api", "operations", "simulator"}),
    "click": ("source_modules", {"__main__", "cli"}),
    "protocol": ("forbidden_modules", {"agent"}),
    "witness": ("forbidden_modules", {"simulator", "errors"}),
}


@pytest.mark.parametrize("contract", NOT_IN)
def test_each_contract_names_every_module(contract: str) -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    key, left_out = NOT_IN[contract]
    listed = [one.split(".") for one in parser[f"importlinter:contract:{contract}"][key].split()]
    known = {path.stem for path in (ROOT / "cloudddp").iterdir() if path.suffix == ".py" or path.is_dir()}
    known -= {"__init__", "__pycache__"}
    assert {words[1] for words in listed if len(words) == 2 and words[0] == "cloudddp"} == known - left_out
