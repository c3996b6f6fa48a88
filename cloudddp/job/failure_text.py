"""Why a job has failed, in words: what failed first, on which node, the likely cause, what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from cloudddp.agent.protocol.jobs import Cause, Failure, JobState, Verdict
from cloudddp.agent.protocol.last_error import LastError
from cloudddp.agent.protocol.sentences import what_failed
from cloudddp.agent.protocol.stacks import named_ranks
from cloudddp.job.outcome import ExitedRank, JobStatus, outcome, rebooted
from cloudddp.text import one_line

LONGEST_DETAIL = 300  # characters of what a program wrote
_LONGEST_STALL = 800  # of where all ranks are
MISSING_MODULE = re.compile(
    r"(?:ModuleNotFoundError|ImportError|Error while finding module|python\S*): .*No module named '?([\w.]+)"
)
_NO_FILE = re.compile(r"FileNotFoundError|No such file or directory|does not exist", re.IGNORECASE)
_PATH = re.compile(r"""['"]([^'"]{1,4096})['"]|([^\s'"(=,]+/[^\s'"),:]*[^\s'"),:.])""")
# As libtorch writes it (DataLoader.cpp, MapAllocator.cpp).
_SHARED_MEMORY = re.compile(r"(insufficient|out of) shared memory|unable to (write|mmap|resize).*/torch_\d")
_LOCAL_RANK = re.compile(r"the following arguments are required: .*--local[_-]rank")


def exited_text(exited: Sequence[ExitedRank]) -> str:
    """Return `rank 1 exited with 0 at 07:25:40 UTC`; of several the time of the first. '' for none."""
    if not exited:
        return ""
    at = _time(exited[0].ended)
    named = named_ranks(sorted({one.rank for one in exited}))
    if len(exited) == 1:
        return f"{named} exited with 0 at {at}"
    return f"{named} exited with 0, rank {exited[0].rank} at {at} as the first"


def cause(states: Mapping[int, JobState]) -> str:
    """Return why a job has failed, in words; '' for one that has not, or where no node knows. Pure."""
    found = outcome(states)
    if found.status in (JobStatus.SUCCEEDED, JobStatus.CANCELLED) or not found.status.ended:
        return ""
    if found.verdict is not None:
        return why(found.verdict, states)
    node = failed_setup(states)
    return "" if node is None else setup_ending(node, states[node])


def failed_setup(states: Mapping[int, JobState]) -> int | None:
    """Return the node on which the setup of a job has failed; None for none."""
    # Of several, one that was rebooted: the others were stopped because of it.
    setups = [node for node, one in states.items() if one.setup]
    return min(setups, key=lambda node: (states[node].rebooted is None, node), default=None)


def why(verdict: Verdict, states: Mapping[int, JobState]) -> str:
    """Return what failed first by a verdict, in words, with the nodes that were rebooted meanwhile."""
    first = verdict.first
    if first is None:
        return ""
    if (known := states.get(first.node)) is not None and known.setup:
        return setup_ending(first.node, known)
    reboots, what = rebooted(states), "was rebooted while the job ran (it started again at"
    restarted = "; ".join(f"node {node} {what} {_time(at)})" for node, at in reboots.items())
    if first.node in reboots and (first.signal or first.cause in (Cause.AGENT, Cause.SILENT)):
        return f"{restarted}; its ranks ended with it"
    return "; ".join(filter(None, (sentence(first), restarted)))


def setup_ending(node: int, state: JobState) -> str:
    if state.rebooted is not None:
        return f"node {node} was rebooted during its setup (it started again at {_time(state.rebooted)})"
    if state.exit_code is None:
        return f"node {node}: its setup was killed"
    return f"node {node}: its setup failed with code {state.exit_code}"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"


def sentence(failure: Failure) -> str:
    """Return `rank 2 on node 1 was killed by SIGKILL`, and a rank that had exited with code 0 before it."""
    longest = _LONGEST_STALL if failure.cause is Cause.STALL else LONGEST_DETAIL
    what, exited = what_failed(failure, one_line(failure.detail, longest)), failure.exited
    if exited is None:
        return what
    who = f"rank {exited.rank} on node {exited.node}"
    if exited.others:
        who += f" and {exited.others} other rank{'s' if exited.others > 1 else ''}"
    ago = f"{exited.ago:.1f} s" if exited.ago < 60 else f"{exited.ago / 60:.0f} min"
    if not exited.likely:
        return f"{what}; {who} had exited with code 0 {ago} before"
    return (
        f"{who} exited with code 0 while other ranks were still running, the likely cause: {ago} later {what}"
    )


def advice(
    error: LastError, *, simulated: bool, environment: str, listed: bool, why_missing: Callable[[str], str]
) -> str:
    """Return what to do about a job that failed for a known reason, from its error; '' for any other.
    `environment`: the file that lists the project's packages, '' for none; `listed`: [setup] names it.
    `why_missing` returns why a rank has not found a file, '' where that is unknown."""
    text = "\n".join(error.lines)
    if found := MISSING_MODULE.search(text):
        name = found[1].partition(".")[0]
        if simulated and name == "torch":
            return (
                "install torch on this computer, whose packages simulated nodes use, or into the "
                "environment that [job] python or [setup] names"
            )
        if listed and environment.endswith("uv.lock"):
            return f"run `uv add` with the package that provides {name}: the next launch installs it"
        if listed:
            return f"add the package that provides {name} to {environment}: the next launch installs it"
        file = environment or "requirements.txt"
        first = "" if environment else f"list the package that provides {name} in {file}, and "
        return f'{first}add [setup] environment = "{file}" to cloudddp.toml: nodes then install it'
    paths = [path for line in error.lines if _NO_FILE.search(line) for path in _PATH.findall(line)]
    for quoted, word in paths[:4]:
        if why := why_missing(quoted or word):
            return why
    if "EOFError: EOF when reading a line" in text:
        return "ranks have no stdin: pass the value as an argument of the script, or with -e NAME=VALUE"
    if _SHARED_MEMORY.search(text):
        return "the workers of a DataLoader filled /dev/shm: use fewer workers, or smaller batches"
    if _LOCAL_RANK.search(text):
        return 'torchrun passes no --local_rank: let the script read int(os.environ["LOCAL_RANK"])'
    if simulated and re.search("no NVIDIA driver|one CUDA device|supported with GPUs", text):
        return "nodes of the simulator have no GPUs: there the script has to use the CPU and the backend gloo"
    return ""
