"""The folder with the stand-ins of guest/, which is mounted over every node's /usr."""

from __future__ import annotations

import compileall
import shutil
import sys
from pathlib import Path

from cloudddp.simulator import guest
from cloudddp.simulator.guest import dispatch
from cloudddp.simulator.hosts.namespaces import rootfs

_COMMAND = """#!{python} -IS
import sys
sys.path.insert(0, "/{folder}")
sys.argv[0] = {name!r}
from guest import dispatch
sys.exit(dispatch.main())
"""


# What pip prints on Ubuntu 24.04 outside a virtual environment (PEP 668).
_EXTERNALLY_MANAGED = """[externally-managed]
Error=To install Python packages system-wide, try apt install python3-xyz. (simulated node)
"""


def _mark_externally_managed(overlay: Path) -> None:
    """Make pip of the system's Pythons refuse to install, unless the simulator itself runs in one of them."""
    if Path(sys.prefix).is_relative_to("/usr"):
        return
    for folder in (*Path("/usr/lib").glob("python3.*"), *Path("/usr/local/lib").glob("python3.*")):
        if (folder / "os.py").exists():
            target = overlay / folder.relative_to("/usr") / "EXTERNALLY-MANAGED"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_EXTERNALLY_MANAGED)


def create(overlay: Path) -> None:
    """Replace the folder with the current stand-ins."""
    shutil.rmtree(overlay, ignore_errors=True)
    package = overlay / rootfs.GUEST.relative_to("usr") / "guest"
    package.mkdir(parents=True)
    for source in Path(guest.__file__).parent.glob("*.py"):
        shutil.copy(source, package / source.name)
    startup = overlay / rootfs.PYTHON_STARTUP.relative_to("usr")
    startup.mkdir()
    shutil.copy(package / "python_startup.py", startup / "sitecustomize.py")
    compileall.compile_dir(startup, quiet=2)
    _mark_externally_managed(overlay)
    # A node's /usr is read-only: without this, each command would spend half of its time compiling.
    compileall.compile_dir(package, quiet=2)
    python = Path(sys.base_prefix) / "bin" / "python3"
    for folder, names in (("bin", dispatch.BIN), ("sbin", dispatch.SBIN), ("local/bin", dispatch.LOCAL_BIN)):
        (overlay / folder).mkdir(parents=True)
        for name in names:
            path = overlay / folder / name
            path.write_text(_COMMAND.format(python=python, folder=rootfs.GUEST, name=name))
            path.chmod(0o755)
    for path in (overlay, *overlay.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
