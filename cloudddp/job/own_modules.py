"""What to do about a rank that could not import a module of the project itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from cloudddp.job.failure_text import MISSING_MODULE
from cloudddp.job.project_scan import as_module, folder_of

_NO_METADATA = re.compile(r"PackageNotFoundError: No package metadata was found for ([\w-]+)")
_SOURCE = re.compile(r'File "(?!.*\.\./)(/[^"\n]{1,1000}\.py)", line \d+')
_INSTALL = "`-e .` in the requirements.txt of [setup] environment installs the project"


def advice(lines: Iterable[str], root: Path) -> str:
    """Return a sentence, from a rank's last lines; '' for any other failure."""
    text = "\n".join(lines)
    if "ImportError: attempted relative import" in text:
        files = (name.split("/") for name in _SOURCE.findall(text))  # the script is in the first frame
        tails = ("/".join(parts[start:]) for parts in files for start in range(1, len(parts)))
        script = next((one for one in tails if os.path.isfile(root / one)), "")  # noqa: PTH113  never raises
        module, folder = as_module(root, script)
        also = "" if folder == "." else f", and add {_setting(folder)}"
        return f"{script} imports relative to its package: start it as `-m {module}`{also}" if module else ""
    if (found := _NO_METADATA.search(text)) and folder_of(root, found[1].replace("-", "_")):
        return f"{found[1]} is not installed on the nodes: {_INSTALL}"
    if (
        (found := MISSING_MODULE.search(text))
        and "." not in found[1]
        and (folder := folder_of(root, found[1]))
    ):
        what = f"{found[1]} is in {folder}/ of this project, where ranks do not look: add {_setting(folder)}"
        return f"{what}; or {_INSTALL}" if (root / "pyproject.toml").is_file() else what
    return ""


def _setting(folder: str) -> str:
    return f"[job] env = {{ PYTHONPATH = {json.dumps(folder)} }} to cloudddp.toml"
