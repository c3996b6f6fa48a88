"""`probe`: everything that the laptop must know about a node before a job, in one reply."""

from __future__ import annotations

import os
import sys
import time

from agent.files.scan import was_written_by_jobs
from agent.files.sync_record import origin_of, settled
from agent.jobs import phases
from agent.node import cuda, machine, store
from agent.node.commands import later, run_quietly
from cloudddp.agent.protocol.machine import BootStage, ProbeReply, ProbeRequest
from cloudddp.agent.protocol.manifest import manifest_digest, manifest_to_wire

REQUEST = ProbeRequest
TIMER = "cloudddp-deadline.timer"
WROTE_SECONDS = 0.2  # for the answer whether earlier jobs wrote anything


def step(request: ProbeRequest) -> ProbeReply:
    folder = store.project_folder(request.project)
    store.create_root()
    if request.boot_seconds:
        # SSH answers before cloud-init has armed the deadline timer.
        run_quietly(["cloud-init", "status", "--wait"], request.boot_seconds)
        _report(BootStage.BOOTED)
    timer = _deadline_timer() if request.deadline else {}
    counted = wrote = None
    if not request.only_files:  # nvidia-smi loads the driver; meanwhile files can be looked at
        counted = later(lambda: machine.count_gpus(request.gpus, request.gpu_seconds))
    version, differs = 0, False
    if request.manifest_digest:
        manifest, version = settled(folder)
        differs = manifest_digest(manifest_to_wire(manifest)) != request.manifest_digest
    if request.manifest_digest and not request.only_files:
        wrote = later(lambda: was_written_by_jobs(folder))
    gpus = (counted() if counted else None) or 0
    if request.boot_seconds:
        _report(BootStage.GPUS)
    python = machine.find_python(request.python, folder)
    running = tuple(phases.running_jobs())
    torch_gpus, torch_error = None, ""
    if python and request.torch_seconds and not running:  # a job may use all of the GPUs' memory
        torch_gpus, torch_error = cuda.usable_gpus(python, request.torch_seconds, request.gpu_seconds)
    ports = machine.free_ports()
    return ProbeReply(
        interface=machine.interface_of(request.private_ip),
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)),
        python=python,
        free_port=ports[0],
        agent_port=ports[1],
        time=time.time(),
        timer_state=timer.get("ActiveState", ""),
        timer_next=timer.get("NextElapseUSecRealtime", ""),
        running=running,
        efa=machine.count_efa() if request.efa else 0,
        differs=differs,
        version=version,
        wrote=wrote is not None and wrote(WROTE_SECONDS) is not False,
        torch_gpus=torch_gpus,
        torch_error=torch_error,
        origin=origin_of(folder),
    )


def _report(stage: BootStage) -> None:
    sys.stderr.write(stage.line.decode())
    sys.stderr.flush()


def _deadline_timer() -> dict[str, str]:
    shown = run_quietly(["systemctl", "show", TIMER, "-p", "ActiveState,NextElapseUSecRealtime"])
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
