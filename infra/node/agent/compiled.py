"""`compile`: writes the agent's modules, compiled for this version of Python, to the file that boot.py reads."""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
import zipfile
from importlib import import_module
from importlib.util import source_hash

from agent import boot

PACKAGE = "/__init__.py"


def main() -> int:
    """Compile the agent that runs. It is replaced atomically: other processes may be reading it."""
    _lower_priority()
    archive = os.path.abspath(sys.argv[0])
    codes = {}
    with zipfile.ZipFile(archive) as modules:
        for name in modules.namelist():
            if "/" in name and name.endswith(".py"):
                is_package = name.endswith(PACKAGE)
                module = name[: -len(PACKAGE) if is_package else -len(".py")].replace("/", ".")
                code = compile(modules.read(name), f"{archive}/{name}", "exec", dont_inherit=True)
                codes[module] = (is_package, marshal.dumps(code))
    data = marshal.dumps((codes, _methods(codes)))
    path = boot.compiled_path()
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(source_hash(data) + data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return 0


def _lower_priority() -> None:
    """Run at the lowest priority: a node that boots, and a computer that simulates many, has more urgent work. Where the kernel
    groups processes by session (autogroup, sched(7)), nice only orders those of one session: this process gets one of its own,
    and that the lowest priority."""
    os.nice(19)
    with contextlib.suppress(OSError):
        os.setsid()
        with open("/proc/self/autogroup", "w") as file:
            file.write("19")


def _methods(codes: boot.Codes) -> boot.Methods:
    """Return the methods of all dataclasses, compiled: those that dataclasses asks for while the modules are imported."""
    known = boot.use_compiled_methods({})
    sys.meta_path.insert(0, boot.Compiled(codes))
    for name in codes:
        import_module(name)
    return known.added
