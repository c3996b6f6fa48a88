"""What a page of the manual runs.

A block `sh` is run, and of a workflow (`yaml`) what its steps run, but for the installation. A block whose
first line is a comment with a file's name (`# train.py`) is that file; one for cloudddp.toml is added to it.
Other blocks are `text`: what they show cannot be run here.
"""

from __future__ import annotations

import re
import shlex

import yaml

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w.-]+\.\w+)\n")


def script(page: str) -> str:
    """Return a page's commands and files as one shell script."""
    lines = ["set -euo pipefail"]
    for kind, text in BLOCK.findall(page):
        if kind == "sh":
            lines.append(text)
        elif kind == "yaml":
            (job,) = yaml.safe_load(text)["jobs"].values()
            steps = [step["run"] for step in job["steps"] if "run" in step]
            assert steps[0].startswith("pip install ")
            lines += steps[1:]
        elif kind in ("python", "toml"):
            named = NAMED.match(text)
            assert named, f"this block does not begin with the name of its file:\n{text}"
            write = ">>" if named[1] == "cloudddp.toml" else ">"
            lines.append(f"printf '%s\\n' {shlex.quote(text)} {write} {named[1]}")
    return "\n".join(lines)
