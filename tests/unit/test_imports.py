"""What modules import and use: no circle, nothing slow in vain, and where they may be used nothing else."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from cloudddp.errors import CloudDDPError
from cloudddp.simulator.control import process

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


@pytest.mark.parametrize("package", ["cloudddp", "infra/node/agent", "train"])
def test_imports_form_no_circle(package: str) -> None:
    graph = imports(ROOT / package)
    assert len(graph) > 10
    assert circle(graph) == []


def test_packages_of_the_trainer_import_each_other_in_one_direction() -> None:
    """Each module of train/ itself counts as a package."""
    packages: dict[str, set[str]] = {}
    for module, found in imports(ROOT / "train").items():
        package, *others = (".".join(one.split(".")[:2]) for one in (module, *found - {"train"}))
        packages.setdefault(package, set()).update({*others} - {package})
    assert circle(packages) == []


def test_trainer_imports_nothing_of_the_launcher() -> None:
    for path in (ROOT / "train").rglob("*.py"):
        packages = {one.split(".")[0] for one in named(path, name(path, ROOT / "train"))}
        assert not packages & {"cloudddp", "infra"}, path


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


def modules_after(code: str) -> set[str]:
    words = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.check_output(words, cwd=ROOT, text=True, timeout=300).split())


def test_reading_settings_imports_neither_boto3_nor_paramiko_and_down_nothing_of_jobs() -> None:
    """What runs jobs, and any fault in it, must not keep nodes running."""
    found = modules_after("import cloudddp.config.spec")
    assert not found & {"boto3", "botocore", "paramiko", "moto", "rich"}
    found = modules_after("import cloudddp.cli.actions.down")
    assert "cloudddp.cluster.teardown" in found
    assert not {name for name in found if name.startswith("cloudddp.job")}


# -- what the laptop's part uses is on macOS, too ------------------------------------------------------------

# What Python has on Linux only.
LINUX = frozenset(
    """
    sched_getaffinity sched_setaffinity memfd_create pidfd_open eventfd splice setns unshare copy_file_range
    posix_fadvise posix_fallocate getresuid setresuid O_TMPFILE O_PATH O_DIRECT epoll prctl
    AF_NETLINK AF_PACKET SO_BINDTODEVICE TCP_USER_TIMEOUT TCP_KEEPIDLE SOCK_CLOEXEC SOCK_NONBLOCK MSG_ERRQUEUE
    sigtimedwait sigwaitinfo SIGRTMIN SIGPWR SIGSTKFLT pidfd_send_signal accept4 pipe2
    """.split()
)
# Programs that macOS has with other options, or not at all.
PROGRAMS = frozenset("stat sed date readlink find xargs tar cp mktemp base64 timeout ip ss setsid".split())
PATHS = ("/proc/", "/sys/", "/dev/shm", "/run/")
# Used only where it is there.
GUARDED = {("ssh/target.py", "TCP_USER_TIMEOUT"), ("timings.py", "/proc/self/stat")}


def laptop() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / "cloudddp").rglob("*.py")):
        name = path.relative_to(ROOT / "cloudddp").as_posix()
        if not name.startswith("simulator/"):
            for node in ast.walk(ast.parse(path.read_text())):
                yield name, node


def used() -> Iterator[tuple[str, str]]:
    """Each file with what it uses: an attribute, a file of the kernel, or a program with its arguments."""
    for name, node in laptop():
        match node:
            case ast.Attribute(attr=attribute) if attribute in LINUX:
                yield name, attribute
            case ast.Constant(value=str(text)) if text.startswith(PATHS):
                yield name, text
            case ast.List(elts=[ast.Constant(value=str(text)), *_]) if text in PROGRAMS:
                yield name, text


def test_laptop_uses_nothing_that_macos_lacks() -> None:
    assert set(used()) == GUARDED


def test_simulator_says_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(CloudDDPError, match="requires Linux") as caught:
        process.start(tmp_path, nodes="process")
    assert "virtual machine" in str(caught.value.hint)
