"""What to do about a job that failed for a known reason, from its last lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_MODULE = re.compile(
    r"(?:ModuleNotFoundError|ImportError|Error while finding module|python\S*): .*No module named '?([\w.]+)"
)
_FILE = re.compile(r"(?:FileNotFoundError|No such file or directory)\b.*?: '([^'\n]{1,4096})'")
_LOCAL_RANK = re.compile(r"the following arguments are required: .*--local[_-]rank")


def advice(
    lines: Iterable[str], *, simulated: bool, has_requirements: bool, why_unsent: Callable[[str], str]
) -> str:
    """Return a sentence, '' for a failure that is not known. `has_requirements`: the project has a requirements.txt. `why_unsent`
    returns why a file of the project is not on the nodes, '' for any other path."""
    text = "\n".join(lines)
    if found := _MODULE.search(text):
        name = found[1].partition(".")[0]
        if simulated and name == "torch":
            return "install torch on this computer, where the simulator runs: its nodes use the packages of that environment"
        what = "-r requirements.txt" if has_requirements else name
        return f'packages are installed by [setup] in cloudddp.toml, for example run = ["pip install {what}"]'
    if (found := _FILE.search(text)) and (why := why_unsent(found[1])):
        return why
    if _LOCAL_RANK.search(text):
        return 'torchrun passes no --local_rank: let the script read int(os.environ["LOCAL_RANK"])'
    if simulated and "Found no NVIDIA driver" in text:
        return "nodes of the simulator have no GPUs: there the script has to use the CPU and the backend gloo"
    return ""
