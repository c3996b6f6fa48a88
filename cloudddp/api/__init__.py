"""The Python API: what `up`, `launch`, `logs`, `pull`, `run` and `down` do, as functions of a program or a
notebook; docs/how-to/python.md shows them.

Settings are those of docs/configuration.md: keyword arguments take the place of flags, and override the
environment and cloudddp.toml. The project is that of the current folder. The functions print nothing, ask
nothing and leave signal handlers as they are; only while AWS creates or deletes something does a signal wait,
in the main thread. `on_progress` is called with a sentence at a time, from any thread. Errors are
CloudDDPError, before anything is called UsageError, and Leftovers where something may still be billed.
"""

from cloudddp.api.cluster import Cluster, Job, Node
from cloudddp.api.functions import attach, run, up
from cloudddp.api.rehearsal import sim
from cloudddp.errors import CloudDDPError, Leftovers, UsageError
from cloudddp.job.follow.verdict import JobResult

__all__ = [
    "CloudDDPError",
    "Cluster",
    "Job",
    "JobResult",
    "Leftovers",
    "Node",
    "UsageError",
    "attach",
    "run",
    "sim",
    "up",
]
