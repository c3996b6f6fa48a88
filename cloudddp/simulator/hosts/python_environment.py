"""The virtual environment of a node: a writable one of its own, in which the packages of the simulator's can
be imported, but for those that only this computer can have (guest/python_packages.py).

So pip installs where its Python looks, `pip install -e .` and console scripts work, and a second environment
is separate from it, as on a machine. It runs before a host of the lab boots, with the standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from cloudddp.simulator.guest import python_packages

PYTORCH = "opt/pytorch"  # where the Deep Learning AMI has it
LONGEST_SHEBANG = 4096  # bytes


def create(
    folder: Path,
    shown: Path,
    *,
    prefix: Path,
    base_prefix: Path,
    chown_to_user: Callable[..., None] = lambda *_: None,
) -> None:
    """Create it in a folder that the node sees at `shown`, unless it is complete: it is a part of the node's
    disk.

    `prefix` and `base_prefix` are those of the simulator's Python; `chown_to_user` gives files to the login
    user.
    """
    if (folder / "pyvenv.cfg").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted boot
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    for path in (packages, folder / "bin"):
        path.mkdir(parents=True)
    lower = prefix / "lib" / version / "site-packages"
    # Beside the environment: pip removes nothing that is outside it.
    views = folder.with_name(f"{folder.name}-packages")
    views.mkdir(exist_ok=True)
    shutil.copy(Path(python_packages.__file__), packages / "of_the_simulator.py")
    shown_views = str(shown.with_name(views.name))
    (packages / "of_the_simulator.pth").write_text(
        f"import of_the_simulator; of_the_simulator.add({str(lower)!r}, {shown_views!r})\n"
    )
    for name in ("python", "python3", version):
        (folder / "bin" / name).symlink_to(base_prefix / "bin" / version)
    for program in (prefix / "bin").iterdir() if prefix != base_prefix else ():
        if not (folder / "bin" / program.name).is_symlink() and program.is_file():
            _add_program(program, folder / "bin" / program.name, shown / "bin/python")
    chown_to_user(folder, views, *folder.rglob("*"))
    # Last: it says that the environment is complete.
    config = (
        f"home = {base_prefix / 'bin'}\ninclude-system-site-packages = false\nversion = "
        f"{sys.version.split()[0]}\n"
    )
    (folder / "pyvenv.cfg").write_text(config)


def _add_program(program: Path, target: Path, python: Path) -> None:
    """Add a program of the simulator's environment. One that is a Python script runs in this environment."""
    with program.open("rb") as file:
        first = file.readline(LONGEST_SHEBANG)
        if not (first.startswith(b"#!") and b"python" in first):
            target.symlink_to(program)  # some are many megabytes: they are not read
            return
        target.write_bytes(b"#!" + os.fsencode(python) + b"\n" + file.read())
    target.chmod(0o755)
