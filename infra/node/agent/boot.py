"""Starts the agent: it is the `__main__.py` of the .pyz, and is compiled by each process.

Python compiles the modules of a zip each time. So the agent has a file beside it with the same modules, compiled by and for
one version of Python (`agent compile`, once, when it is installed). It is used if it belongs to this user, nobody else may
write to it, and its checksum is right; otherwise the sources are. The laptop could not ship it: byte code fits one version of
Python only, and which one a node has, and whether it is trusted there, is known to the node alone.

The first step waits for this process to start, so that also the garbage collector does not run meanwhile, and `inspect` (with
`ast` and `dis`), which dataclasses imports for classes without docstrings, is loaded when it is used. The methods that
dataclasses writes as texts, and compiles one by one, are in the file, too: of all steps together they took 31 ms.
"""

from __future__ import annotations

import gc
import marshal
import os
import stat
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import source_hash, spec_from_loader  # runpy has imported both
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Optional

    Codes = dict[str, tuple[bool, bytes]]  # module -> (whether it is a package, its marshalled code)
    Methods = dict[bytes, bytes]  # the hash of a text that dataclasses compiles -> its marshalled code

HASH_BYTES = 8


def compiled_path() -> str:
    """Return where the modules are that this version of Python has compiled."""
    return f"{os.path.abspath(sys.argv[0])}.{sys.implementation.cache_tag}-{sys.hexversion:x}"


class Compiled:
    """Imports modules whose code is in memory."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes

    def find_spec(
        self, name: str, _path: Optional[Sequence[str]] = None, _target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name not in self._codes:
            return None
        loader: Any = self
        return spec_from_loader(name, loader, is_package=self._codes[name][0])

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(marshal.loads(self._codes[module.__name__][1]), module.__dict__)  # noqa: S102, S302  checked by `read`


class CompiledMethods:
    """Takes the place of `exec` in the module dataclasses, which calls it with a text and where to run it."""

    def __init__(self, methods: Methods) -> None:
        self.methods = methods
        self.added: Methods = {}

    def __call__(self, text: str, *where: Any) -> None:
        key = source_hash(text.encode())
        known = self.methods.get(key)
        code: Any = compile(text, "<string>", "exec") if known is None else marshal.loads(known)  # noqa: S302  checked by `read`
        if known is None:
            self.added[key] = marshal.dumps(code)
        exec(code, *where)  # noqa: S102


def use_compiled_methods(methods: Methods) -> CompiledMethods:
    """Make dataclasses use methods that are compiled. Return what also collects those that are missing."""
    import dataclasses

    found = CompiledMethods(methods)
    vars(dataclasses)["exec"] = found
    return found


def read(path: str) -> tuple[Codes, Methods]:
    """Return the compiled modules and methods in a file; none for one that does not exist or may not be trusted."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
                return {}, {}
            data = file.read()
    except OSError:
        return {}, {}
    digest, codes = data[:HASH_BYTES], data[HASH_BYTES:]
    if source_hash(codes) != digest:
        return {}, {}
    found: tuple[Codes, Methods] = marshal.loads(codes)  # noqa: S302  only this user can have written it
    return found


class Deferred(ModuleType):
    """Takes the place of a module until one of its names is used. `importlib.util.LazyLoader` cannot: with it already the
    `import` statement, which looks at `__spec__`, loads the module."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


if __name__ == "__main__":
    gc.disable()  # until the imports are done (garbage.py)
    sys.modules.setdefault("inspect", Deferred("inspect"))
    codes, methods = read(compiled_path())
    sys.meta_path.insert(0, Compiled(codes))
    if methods:
        use_compiled_methods(methods)
    from agent.__main__ import main

    code = main()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before the start
        with suppress(OSError):  # the laptop has disconnected
            stream.flush()
    os._exit(
        code
    )  # saves 8 ms in which the interpreter frees its modules; threads that still run are daemons
