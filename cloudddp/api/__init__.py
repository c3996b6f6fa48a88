"""The Python API: what `up`, `launch`, `logs`, `pull`, `run` and `down` do, as functions of a program or a
notebook.

    import cloudddp

    with cloudddp.up(nodes=2, instance_type="g5.xlarge", max_hours=2) as cluster:
        job = cluster.launch("train.py", args=["--epochs", "10"])
        result = job.wait(on_line=print)
        job.pull()

Settings are those of docs/configuration.md: keyword arguments take the place of flags, and override the
environment and cloudddp.toml. As on the command line, the project is that of the current folder.

The functions print nothing, ask nothing and leave signal handlers as they are; only while AWS creates or
deletes something does a signal wait, in the main thread, until that is done. `on_progress` is called with a
sentence at a time, from any thread, one call at a time: `on_progress=print` suits a notebook. Errors are
CloudDDPError (`message`, `hint`, and `exit_code` as of the command line), before anything is called
UsageError, and Leftovers where something may still be billed.
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
