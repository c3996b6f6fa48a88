"""The protocol between the laptop and the node agent: each request, reply, frame, limit and constant, defined
once.

Both sides import these modules: the laptop from the installed package, the agent from a copy beside it. So
they need Python 3.9 and the standard library only, and import nothing else of cloudddp.

A step is a command, `python3 AGENT STEP`, or one of several over `serve` (codec.py). Its
request is JSON, the first line of stdin. Its reply is the last line on stdout; STREAMS write frames instead.

Each module holds one topic, so that a step of the agent loads only what it needs.
"""

from __future__ import annotations

from enum import IntEnum

# Increase it when a message or a file of the node's store changes so that an older agent would misread it. An
# agent replaces the store of another version while no job runs, and refuses to touch it while one does.
VERSION = 7

LAUNCHER_RANK = -1  # the rank number of the launcher's (torchrun's) own log
SETUP_RANK = -2  # the rank number of the log of the setup commands
NOTE = "--- cloudddp: "  # begins each line that the agents add to a log
RESTART_NOTE = f"{NOTE}restart "  # that before the lines of the next attempt

TASK_VARIABLE = "CLOUDDDP_TASK"  # marks every process of a job on a node; children inherit it
ATTEMPT_VARIABLE = "CLOUDDDP_ATTEMPT"  # of every rank: how often the job was started again
SUPERVISOR_VARIABLE = "CLOUDDDP_SUPERVISOR"  # of every rank: the process that ends it (kernel.name)
NOT_STARTED = 127  # the exit code of a command that cannot be started, as in a shell

STATUS_VARIABLE = "CLOUDDDP_STATUS_FILE"  # the file in which rank 0 may report its training status
STEP_VARIABLE = "CLOUDDDP_STEP_FILE"  # the file in which each rank may report its steps

# Steps that any version may run while a job of another version runs: they change nothing that another version
# reads. What they report about a store of another version may be incomplete.
SAFE_STEPS = frozenset(("pack", "new_files", "readings"))


# Steps whose output may be any bytes: the agent's process ends with them.
STREAMS = frozenset(("pack", "follow", "readings"))


class ExitCode(IntEnum):
    """Exit codes of a step that the laptop acts on. Any other one but 0 is a failure that stderr explains."""

    NO_JOB = 95  # the node does not know the job
    OTHER_VERSION = 96  # the last line of stderr is a VersionConflict
    NO_AGENT = 97  # from the shell: the agent's file is missing or was changed
