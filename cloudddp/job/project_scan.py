"""What `init` sees in a project: its entry scripts, where they save, what they require, and folders of data
that are not sent; how ranks find its modules. It reads files as syntax trees, and runs none of them.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import json
import os
import posixpath
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloudddp.config import package_inputs
from cloudddp.config.spec import SetupSpec
from cloudddp.job.failure_text import MISSING_MODULE

ENVIRONMENTS = ("uv.lock", "requirements.txt", "environment.yml", "environment.yaml", "pyproject.toml")
"""Files that [setup] environment takes, the most exact one first."""

_MOST_FOLDERS, _MOST_FILES, _MOST_BYTES, _DEPTH = 1000, 500, 1 << 20, 4
_SKIPPED = frozenset(
    """
    node_modules site-packages build dist tests test docs doc notebooks venv env results runs outputs wandb
    """.split()
)
_NEVER = frozenset("setup.py conftest.py noxfile.py tasks.py fabfile.py __init__.py".split())
_NAMES = ("train", "main", "run", "finetune", "pretrain", "fit")
_ASIDE = re.compile(  # not what a user would start first
    r"(^|[/_-])(legacy|old|deprecated|archived?|backup|copy|debug|toy|demos?|examples?|eval\w*|test\w*|infer\w*|"
    r"predict\w*|generate|sample|export|convert\w*|prepare\w*|preprocess\w*|bench\w*)(?=[/_.\d-])"
)
_PARSERS = frozenset("argparse click typer tyro fire hydra absl simple_parsing jsonargparse".split())
_TRAINING = frozenset(
    """
    init_process_group DistributedDataParallel DDP FullyShardedDataParallel fully_shard Accelerator Trainer
    TrainingArguments LightningCLI DistributedSampler
    """.split()
)
_VARIABLES = frozenset("RANK LOCAL_RANK WORLD_SIZE".split())  # of torchrun
_NO_PATH = re.compile(r"://|\$|%|^[A-Za-z]:|\\|[^ -~]")  # URLs, variables, paths of Windows
_MADE = re.compile(
    r"(^|[/_-])(results?|runs?|outputs?|out|logs?|ckpts?|checkpoints?|snapshots?|models?|weights|wandb|mlruns|"
    r"lightning_logs|tb_logs|tensorboard|venv|env|build|dist|cache|tmp)([/_-]|$)"
)
_SAVES = {"save": 1, "save_pretrained": 0, "save_checkpoint": 0, "save_model": 0}  # position of the path
_SAVE_KEYWORDS = frozenset(
    "default_root_dir output_dir save_dir checkpoint_dir ckpt_dir dirpath log_dir logging_dir out_dir".split()
)

_NO_METADATA = re.compile(r"PackageNotFoundError: No package metadata was found for ([\w-]+)")
_SOURCE = re.compile(r'File "(?!.*\.\./)(/[^"\n]{1,1000}\.py)", line \d+')
_INSTALL = "`-e .` in the requirements.txt of [setup] environment installs the project"


@dataclass(frozen=True, slots=True)
class ScannedScript:
    """A script that may be what to launch. `saves`: literal paths to which it writes; `texts`: all its
    strings; `modules`: what it imports, without submodules; `level`: the dots of its relative imports."""

    path: str
    score: int
    saves: tuple[str, ...] = ()
    texts: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    level: int = 0


@dataclass(frozen=True, slots=True)
class ScanResult:
    scripts: tuple[ScannedScript, ...] = ()  # the most likely one first
    environment: str = ""
    data: tuple[str, ...] = ()  # folders that git ignores and that a script names
    start: tuple[str, ...] = ()  # the first script, or -m and its module
    modules: str = ""  # the folder with modules of the project that it needs and does not find by itself

    @property
    def outside(self) -> dict[str, str]:
        """Paths outside the project to which a script saves -> the script."""
        return {path: script.path for script in self.scripts for path in script.saves if _is_outside(path)}

    @property
    def saved(self) -> dict[str, str]:
        """Top folders or files in the project to which a script saves -> the script."""
        return {
            posixpath.normpath(path).partition("/")[0]: script.path
            for script in self.scripts
            for path in script.saves
            if path not in self.outside and posixpath.normpath(path) != "."
        }


def saved_outside(root: Path, script: str) -> list[str]:
    """Return the paths outside the project to which a script saves."""
    found = _read(root, script)
    return [path for path in found.saves if _is_outside(path)] if found else []


def scan(root: Path, ignored: Sequence[str] = ()) -> ScanResult:
    """Return what is found below a folder. `ignored`: what git ignores there, folders with a / at the end."""
    scripts = [one for path in _python_files(root) if (one := _read(root, path))]
    likely = sorted((script for script in scripts if script.score >= 4), key=_order)
    found = ScanResult(tuple(likely), listing_of(root))
    data = _data(ignored, {text for one in likely for text in one.texts}, found.saved)
    start, modules = _start(root, likely[0], found.environment) if likely else ((), "")
    return replace(found, data=tuple(name.rstrip("/") for name in data), start=start, modules=modules)


def _order(script: ScannedScript) -> tuple[bool, int, bool, str]:
    return bool(_ASIDE.search(script.path)), -script.score, Path(script.path).stem not in _NAMES, script.path


def _start(root: Path, script: ScannedScript, environment: str) -> tuple[tuple[str, ...], str]:
    """Return what starts a script, and the folder of modules that it needs and does not find by itself."""
    module, folder = as_module(root, script.path, script.level) if script.level else ("", "")
    if module:
        return ("-m", module), "" if folder == "." else folder
    here = posixpath.dirname(script.path) or "."
    # A listed name may be that of a package from an index, which a folder of the project must not hide.
    texts = package_inputs.read(root, SetupSpec(environment=environment)).texts.values()
    listed = {name.replace("-", "_") for text in texts for name in re.findall(r"[\w-]+", text)}
    needed = sorted(script.modules - sys.stdlib_module_names - listed)
    folders = [folder_of(root, name, (glob.escape(here), "src", ".")) for name in needed]
    return (script.path,), next((one for one in folders if one not in ("", here)), "")


def folder_of(root: Path, module: str, patterns: Sequence[str] = ("src", ".", "*", "*/*")) -> str:
    """Return the folder of a project from which a module can be imported, `.` for its top; '' for none."""
    for path in (path for pattern in patterns for path in root.glob(f"{pattern}/{module}*")):
        if path.name == f"{module}.py" or (path.name == module and next(path.glob("*.py"), None)):
            return path.parent.relative_to(root).as_posix()
    return ""


def as_module(root: Path, path: str, level: int = 1) -> tuple[str, str]:
    """Return the name for `-m` of a script that imports relative to its package, with `level` dots, and the
    folder in which Python finds the package; '' for a script that is not so deep in one."""
    *folders, stem = path.removesuffix(".py").split("/")
    if level > len(folders):
        return "", ""
    while level < len(folders) and root.joinpath(*folders[:-level], "__init__.py").is_file():
        level += 1
    names = [*folders[-level:], *([] if stem == "__main__" else [stem])]
    return ".".join(names), "/".join(folders[:-level]) or "."


def import_advice(lines: Iterable[str], root: Path) -> str:
    """Return what to do about a rank that could not import a module of the project, '' for other failures."""
    text = "\n".join(lines)
    if "ImportError: attempted relative import" in text:
        files = (name.split("/") for name in _SOURCE.findall(text))  # the script is in the first frame
        tails = ("/".join(parts[start:]) for parts in files for start in range(1, len(parts)))
        script = next((tail for tail in tails if os.path.isfile(root / tail)), "")  # noqa: PTH113  never raises
        module, folder = as_module(root, script)
        also = "" if folder == "." else f", and add {_python_path(folder)}"
        return f"{script} imports relative to its package: start it as `-m {module}`{also}" if module else ""
    if (found := _NO_METADATA.search(text)) and folder_of(root, found[1].replace("-", "_")):
        return f"{found[1]} is not installed on the nodes: {_INSTALL}"
    name = found[1] if (found := MISSING_MODULE.search(text)) else "."
    if "." in name or not (folder := folder_of(root, name)):
        return ""
    what = f"{name} is in {folder}/ of this project, where ranks do not look: add {_python_path(folder)}"
    return f"{what}; or {_INSTALL}" if (root / "pyproject.toml").is_file() else what


def _python_path(folder: str) -> str:
    return f"[job] env = {{ PYTHONPATH = {json.dumps(folder)} }} to cloudddp.toml"


def _is_outside(path: str) -> bool:
    return path.startswith("~") or posixpath.normpath(path).startswith(("/", ".."))


def _data(ignored: Sequence[str], texts: Iterable[str], saved: Collection[str]) -> list[str]:
    """Return the folders among what git ignores that a script names in `texts` and seems to read: not those
    where it saves, nor what tools make."""
    named = {posixpath.normpath(text) for text in texts if text}
    return [
        name
        for name in ignored
        if name.endswith("/")
        and any(f"{one}/".startswith(name) for one in named)
        and name.partition("/")[0] not in saved
        and not name.startswith((".", "~"))
        and not _MADE.search(name.lower())
        and name.isprintable()
    ]


def named_by(root: Path, script: str, args: Sequence[str], ignored: Sequence[str]) -> list[str]:
    """Return the folders among `ignored` that a script or its arguments name."""
    texts = {*args, *(arg.partition("=")[2] for arg in args)}
    if found := _read(root, script):
        texts |= found.texts
    return _data(ignored, texts, ScanResult((found,)).saved if found else ())


def listing_of(root: Path) -> str:
    """Return the file of a project that lists its packages; '' for none."""
    return next((name for name in ENVIRONMENTS if _lists_packages(root / name)), "")


def _lists_packages(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path.is_file() and (path.name != "pyproject.toml" or b"dependencies" in _contents(path))
    return False


def _python_files(root: Path) -> Iterator[str]:
    """Yield the paths of Python files that may be scripts, those near the top first."""
    count = 0
    for number, (folder, folders, names) in enumerate(os.walk(root)):
        if number > _MOST_FOLDERS:
            return
        here = Path(folder).relative_to(root)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "_"))
            and name not in _SKIPPED
            and len(here.parts) < _DEPTH
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(".py") and name not in _NEVER and not name.startswith("test_"):
                count += 1
                if count > _MOST_FILES:
                    return
                yield (here / name).as_posix()


def _read(root: Path, path: str) -> ScannedScript | None:
    try:
        tree = ast.parse(_contents(root / path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return examine(path, tree)


def _contents(path: Path) -> bytes:
    """Return what is in a regular file of at most _MOST_BYTES. Raises OSError, ValueError."""
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is no regular file, or large")
    return path.read_bytes()


def examine(path: str, tree: ast.Module) -> ScannedScript:
    """Return what a syntax tree says about a script. Pure."""
    names: set[str] = set()
    saves: list[str] = []
    texts: set[str] = set()
    is_main = False
    modules: set[str] = set()
    level = 0
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                modules |= {alias.name.partition(".")[0] for alias in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=dots):
                level = max(level, dots)
                names |= {alias.name for alias in aliases}
                if module and not dots:
                    modules.add(module.partition(".")[0])
            case ast.Attribute(attr=name) | ast.Name(id=name):
                names.add(name)
            case ast.Compare(left=ast.Name(id="__name__")):
                is_main = True
            case ast.Constant(value=str(text)) if len(text) < 200:
                texts.add(text)
            case ast.Call():
                saves += _saved_by(node)
    stem, depth = Path(path).stem.lower(), path.count("/")
    score = (
        2 * is_main
        + bool(modules & _PARSERS)
        + bool(modules & {"torch", "lightning", "pytorch_lightning", "accelerate", "transformers"})
        + 3 * bool(names & _TRAINING)
        + 3 * bool(_VARIABLES & texts)
        + 2 * any(stem.startswith(name) or stem.endswith(name) for name in _NAMES)
        - depth
    )
    return ScannedScript(
        path, score, tuple(dict.fromkeys(saves)), frozenset(texts), frozenset(modules), level
    )


def _saved_by(call: ast.Call) -> Iterator[str]:
    """Yield the literal paths to which a call writes."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in _SAVES and len(call.args) > _SAVES[name]:
        yield from _literal(call.args[_SAVES[name]])
    for keyword in call.keywords:
        if keyword.arg in _SAVE_KEYWORDS:
            yield from _literal(keyword.value)
    option = next(iter(_literal(call.args[0])), "") if call.args else ""
    if name == "add_argument" and option.lstrip("-").replace("-", "_") in _SAVE_KEYWORDS | {"out", "output"}:
        yield from (text for one in call.keywords if one.arg == "default" for text in _literal(one.value))


def _literal(node: ast.expr) -> Iterator[str]:
    """Yield a literal path; of an f-string, or a path made with /, its literal beginning up to the last /."""
    match node:
        case ast.Constant(value=str(text)) if text and not _NO_PATH.search(text):
            yield text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if "/" in text:
            yield text.rpartition("/")[0] or "/"
        case ast.BinOp(left=left, op=ast.Div()):
            yield from _literal(left)
        case ast.Call(func=ast.Name(id="Path"), args=[first, *_]):
            yield from _literal(first)
