"""What cloudddp uses of other packages beyond their public interfaces exists in the installed versions.

`make lowest` runs this file with the lowest versions that pyproject.toml allows.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.harness import ROOT

# Our folder -> the packages whose private names are looked for in it; ssh/ may use none.
OTHERS = {
    "ssh": ("paramiko",),
    "simulator": ("moto", "werkzeug", "asyncssh"),
    "aws": ("boto3", "botocore", "http.client"),
}
# Our own attributes of moto's objects.
MARKS = {"_capacity", "_credits", "_deep_learning", "_left_reservation", "_status_code"}
# Attributes of paramiko's objects that it does not document.
UNDOCUMENTED = {
    *("clear_to_send", "clear_to_send_timeout", "packetizer", "saved_exception", "sock"),
    *("eof_received", "eof_sent", "in_buffer", "in_stderr_buffer", "out_buffer_cv", "set_event"),
    *("out_max_packet_size", "out_window_size", "status_event"),
}
OF_PYTHON = {"_asdict", "_replace", "_exit", "_closed"}
PRIVATE = re.compile(r"_[a-z]\w*")


@cache
def parsed(folder: Path) -> list[list[ast.AST]]:
    """Return the nodes of each module in a folder, or of one module."""
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    return [list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in paths]


def attributes(nodes: list[ast.AST], *, others: bool) -> Iterator[str]:
    """Yield the attributes that code defines: in classes, on `self`, and with `others` on any object."""
    for node in nodes:
        match node:
            case ast.ClassDef():
                for child in node.body:
                    match child:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            yield name
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            yield name
                        case ast.Assign(targets=targets):
                            yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.Attribute(attr=name, value=ast.Name(id=owner), ctx=ast.Store()):
                if others or owner in ("self", "cls"):
                    yield name


def of_others(folder: str) -> set[str]:
    """Return the private names of other packages that a folder of ours uses: attributes that the module does
    not define; what it reads of `super()`; and what it defines or sets and never reads, so that the other
    package does."""
    modules = parsed(ROOT / "cloudddp" / folder)
    read = {
        node.attr
        for nodes in modules
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    } | {node.id for nodes in modules for node in nodes if isinstance(node, ast.Name)}
    found: set[str] = set()
    for nodes in modules:
        own = set(attributes(nodes, others=False))
        found |= own - read
        for node in nodes:
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                    found.add(node.attr)
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name))) if name in OTHERS[folder]:
                    found.add(node.attr)
                case ast.Attribute() if node.attr not in own:
                    found.add(node.attr)
    return {name for name in found if PRIVATE.fullmatch(name)} - OF_PYTHON


@pytest.mark.parametrize("folder", ["simulator", "aws"])
def test_private_names_of_other_packages_exist(folder: str) -> None:
    theirs: set[str] = set()
    for package in OTHERS[folder]:
        path = Path(str(importlib.import_module(package).__file__))
        for nodes in parsed(path.parent if path.name == "__init__.py" else path):
            theirs |= set(attributes(nodes, others=True))
    used = of_others(folder)
    assert used & theirs
    missing = used - theirs - MARKS
    assert not missing, f"no longer in {', '.join(OTHERS[folder])}: {sorted(missing)}"


def test_ssh_uses_what_paramiko_documents() -> None:
    names = {
        node.attr
        for nodes in parsed(ROOT / "cloudddp" / "ssh")
        for node in nodes
        if isinstance(node, ast.Attribute)
    }
    assert of_others("ssh") == set()
    assert not names & UNDOCUMENTED


def test_imported_names_exist() -> None:
    """In functions, too, where a missing one would show only when it is needed."""
    packages = {package.partition(".")[0] for names in OTHERS.values() for package in names} - {"http"}
    missing = []
    for nodes in parsed(ROOT / "cloudddp"):
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in packages:
                for alias in node.names:
                    try:
                        if not hasattr(importlib.import_module(str(node.module)), alias.name):
                            importlib.import_module(f"{node.module}.{alias.name}")
                    except ImportError:
                        missing.append(f"{node.module}.{alias.name}")
    assert missing == []
