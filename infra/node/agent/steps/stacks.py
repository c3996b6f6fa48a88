"""`stacks`: read the stacks of a job's ranks on this node."""

from __future__ import annotations

import sys
from typing import Union

from agent.jobs import phases, rank_records
from agent.node import store
from agent.watch import py_spy, stacks
from cloudddp.agent.protocol import ExitCode
from cloudddp.agent.protocol.stacks import StacksReply, StacksRequest

REQUEST = StacksRequest


def step(request: StacksRequest) -> Union[StacksReply, int]:
    folder = store.job_folder(request.job)
    if not phases.was_started(folder):
        sys.stderr.write(f"no job {request.job} on this node\n")
        return int(ExitCode.NO_JOB)
    platform = py_spy.platform()
    ranks = rank_records.running(folder)
    if not ranks:
        return StacksReply((), platform=platform)
    python = stacks.python_of(ranks[0])
    if not py_spy.find(python) and not request.install:
        return StacksReply((), lacks_tool=True, platform=platform)
    return StacksReply(tuple(stacks.gather(folder)), lacks_tool=not py_spy.install(python), platform=platform)
