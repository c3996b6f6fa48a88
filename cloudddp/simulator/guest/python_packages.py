"""Runs at the start of every Python on a simulated node: adds the packages of the simulator's environment.

What was installed there from a folder of this computer, such as the project itself by `pip install -e .`, is
left out, for pip on the node, too: nodes on AWS do not have it, and a job that needs it has to fail in the
rehearsal. PyTorch stays, which the image has.

Standalone, because it is copied to the node.
"""

from __future__ import annotations

import os
import site

_OF_THE_IMAGE = ("torch", "torchvision", "torchaudio")


def add(packages: str, views: str) -> None:
    """Add what is in the folder `packages`. Folders of links to it are made below `views`, a new one when it
    has changed."""
    try:
        view = f"{views}/{os.stat(packages).st_mtime_ns}"  # noqa: PTH116  pathlib takes 10 ms
        if not os.path.isdir(view):  # noqa: PTH112
            _create(view, packages)
    except OSError:  # there is no such folder, or the disk is full
        view = packages
    site.addsitedir(view)


def _create(view: str, packages: str) -> None:
    import shutil
    from pathlib import Path

    hidden = _from_folders(packages)
    new = Path(f"{view}.{os.getpid()}")
    new.mkdir(parents=True)
    for name in os.listdir(packages):  # noqa: PTH208
        if name not in hidden:
            (new / name).symlink_to(Path(packages, name))
    try:
        new.rename(view)
    except OSError:
        shutil.rmtree(new)
        if not os.path.isdir(view):  # noqa: PTH112  another process may have been first
            raise


def _from_folders(packages: str) -> set[str]:
    """Return the entries of packages that were installed from a folder of this computer, which the node may
    not see. conda's packages name one, too: that of their build."""
    import csv
    import json
    from pathlib import Path

    found: set[str] = set()
    for path in Path(packages).glob("*.dist-info/direct_url.json"):
        name = path.parent.name
        try:
            origin = json.loads(path.read_bytes())
            by_conda = (path.parent / "INSTALLER").read_text().strip() == "conda"
            is_here = "dir_info" in origin and origin["url"].startswith("file:") and not by_conda
            if not is_here or name.partition("-")[0] in _OF_THE_IMAGE:
                continue
            record = (path.parent / "RECORD").read_text(encoding="utf-8").splitlines()
            tops = {row[0].partition("/")[0] for row in csv.reader(record) if row}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error):
            continue
        # A folder without __init__.py may have modules of other packages, too.
        found |= {
            top
            for top in tops
            if Path(packages, top).is_file() or Path(packages, top, "__init__.py").exists()
        }
        found.add(name)
    return found
