"""`stacks`: read the stacks of a job's ranks on this node, and PyTorch's dumps; or analyze those of all
nodes."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Union

from agent.jobs import phases, rank_records
from agent.node import machine, store
from agent.watch import flight_recorder, py_spy, stacks
from cloudddp.agent.protocol import ExitCode
from cloudddp.agent.protocol.stacks import StacksReply, StacksRequest

REQUEST = StacksRequest


def step(request: StacksRequest) -> Union[StacksReply, int]:
    folder = store.job_folder(request.job)
    if not phases.was_started(folder):
        sys.stderr.write(f"no job {request.job} on this node\n")
        return int(ExitCode.NO_JOB)
    if request.dumps:
        python = machine.find_python(request.python, store.project_folder(request.project))
        return StacksReply((), conclusion=flight_recorder.analyze(folder, python, request.dumps))
    platform = py_spy.platform()
    ranks = rank_records.running(folder)
    if not ranks:
        return StacksReply((), platform=platform, packed=flight_recorder.pack(folder))
    python = stacks.python_of(ranks[0])
    if not py_spy.find(python) and not request.install:
        return StacksReply((), lacks_tool=True, platform=platform)
    found = stacks.gather(folder)
    lacks_tool, packed = not py_spy.install(python), flight_recorder.pack(folder)
    return replace(found, lacks_tool=lacks_tool, platform=platform, packed=packed)
