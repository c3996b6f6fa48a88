"""`probe`: everything that the laptop must know about a node before a job, in one reply."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from agent.files.scan import was_written_by_jobs
from agent.files.sync_record import origin_of, settled
from agent.jobs import phases, poweroff
from agent.node import cuda, machine, store
from agent.node.commands import run_quietly
from cloudddp.agent.protocol.machine import MAX_FOLDERS, BootStage, ProbeReply, ProbeRequest
from cloudddp.agent.protocol.manifest import (
    MAX_FILES,
    folder_digests,
    manifest_digest,
    manifest_to_wire,
    nested,
)

REQUEST = ProbeRequest
TIMER = "cloudddp-deadline.timer"
WROTE_SECONDS = 0.2  # for the answer whether earlier jobs wrote anything


def step(request: ProbeRequest) -> ProbeReply:
    folder = store.project_folder(request.project)
    store.create_root()
    if request.boot_seconds:
        machine.wait_for_boot(request.boot_seconds)
        _report(BootStage.BOOTED)
    timer = _deadline_timer() if request.deadline else {}
    counted = wrote = None
    if not request.only_files:  # nvidia-smi loads the driver; meanwhile files can be looked at
        counted = _Found(lambda: machine.count_gpus(request.gpus, request.gpu_seconds))
    folders, version = _different_folders(folder, request.manifest_digest)
    if request.manifest_digest and not request.only_files:
        wrote = _Found(lambda: was_written_by_jobs(folder))
    gpus = counted.within() if counted else 0
    if request.boot_seconds:
        _report(BootStage.GPUS)
    python = machine.find_python(request.python, folder)
    running = tuple(phases.running_jobs())
    # A job may use all of the GPUs' memory.
    torch_gpus, torch_error = (None, "") if running else _usable_gpus(python, request)
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
        poweroff=poweroff.reply(),
        efa=machine.count_efa() if request.efa else 0,
        folders=folders,
        version=version,
        wrote=wrote is not None and bool(wrote.within(WROTE_SECONDS, late=True)),
        torch_gpus=torch_gpus,
        torch_error=torch_error,
        origin=origin_of(folder),
    )


def _report(stage: BootStage) -> None:
    sys.stderr.write(stage.line.decode())
    sys.stderr.flush()


class _Found:
    """What a function finds in a thread, while this step does something else."""

    def __init__(self, find: Callable[[], int]) -> None:
        self._found = 0
        self._find = find
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._found = self._find()

    def within(self, seconds: Optional[float] = None, *, late: int = 0) -> int:
        """Wait for it, and return it, or `late` where it takes longer."""
        self._thread.join(seconds)
        return late if self._thread.is_alive() else self._found


def _usable_gpus(python: str, request: ProbeRequest) -> tuple[Optional[int], str]:
    if not request.torch_seconds:
        return None, ""
    return cuda.usable_gpus(python, request.torch_seconds, request.gpu_seconds)


def _deadline_timer() -> dict[str, str]:
    shown = run_quietly(["systemctl", "show", TIMER, "-p", "ActiveState,NextElapseUSecRealtime"])
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def _different_folders(folder: Path, digest: str) -> tuple[Optional[dict[str, str]], int]:
    """Return the digests of the project's folders, or None where the manifest has this digest or none was
    given; and the version of the project that they are of."""
    if not digest:
        return None, 0
    manifest, version = settled(folder)
    folders = folder_digests(nested(manifest_to_wire(manifest)))
    if manifest_digest(folders) == digest:
        return None, version
    # After an interrupted transfer there may be the files of two syncs. {} is as good: `receive` compares
    # each file.
    fits = len(folders) <= MAX_FILES and sum(map(len, folders)) < MAX_FOLDERS // 4
    return (folders if fits else {}), version
