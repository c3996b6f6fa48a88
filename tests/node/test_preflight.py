"""Nodes that are not alike, or have a defect: no rank starts, and the reason names the nodes and both
values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.agentnode import FOREVER, first_of
from support.gangs import Gangs, Make
from support.programs import program

from agent.gang import preflight
from agent.ranks import causes
from cloudddp.agent.protocol.jobs import Cause
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Container, Process


def path(folder: Path) -> str:
    return f"{folder}:{os.environ['PATH']}"


def refused(job: Gangs) -> str:
    """Wait for the end of a job that preflight refused; return why, which every node says, once no process is
    left."""
    first = first_of(job.verdict())
    assert first.cause is Cause.PREFLIGHT
    for node in job.nodes:
        assert list((node.folder() / "ranks").iterdir()) == [], "a rank has started"
    return first.detail


def test_gpus_and_drivers_that_differ(gangs: Make, tmp_path: Path) -> None:
    job = gangs(2, preflight=True)
    for node, (count, driver) in zip(job.nodes, ((8, "580.1"), (7, "570.2")), strict=True):
        bin_folder = tmp_path / f"bin{node.number}"
        lists = f"for n in $(seq {count}); do echo 'NVIDIA H100 80GB HBM3, {driver}'; done"
        program(bin_folder / "nvidia-smi", lists)
        node.variables["PATH"] = path(bin_folder)
    replies = job.start(FOREVER, FOREVER)
    gpus = "; ".join(f"{count} x NVIDIA H100 80GB HBM3 on node {node}" for node, count in enumerate((8, 7)))
    drivers = "the NVIDIA driver differs: 580.1 on node 0; 570.2 on node 1"
    expected = (f"the number or kind of GPUs differs: {gpus}", drivers)
    refusals = [reply.unreachable for reply in replies.values()]
    assert {text for one in refusals if one is not None for text in one.problems} == set(expected)
    assert None not in refusals
    assert refused(job) == "; ".join(expected)


def test_images_that_differ(gangs: Make) -> None:
    """A tag has moved, and one node has pulled it before. No container is started, so no Docker is needed."""
    job = gangs(2, preflight=True)
    requests = {}
    for node in job.nodes:
        own = (Process((), ("python3", node.script(FOREVER)), {"RANK": str(node.number)}),)
        container = Container(f"sha256:{node.number}")
        requests[node] = node.starting(processes=own, gang=job.gang, container=container)
    job.start_requests(requests)
    said = "the image of job.container differs: sha256:0 on node 0; sha256:1 on node 1"
    assert refused(job) == said


def test_comparison_is_left_out_on_request(gangs: Make, tmp_path: Path) -> None:
    """The connections are made all the same, without which the nodes could not end together."""
    job = gangs(2)
    program(tmp_path / "bin" / "nvidia-smi", "echo 'NVIDIA L4, 580.1'")
    job[1].variables["PATH"] = path(tmp_path / "bin")
    job.start("pass", "pass")
    assert job.verdict().phase is JobPhase.SUCCEEDED
    job = gangs(2, preflight=True)
    replies = job.start("pass", "pass")
    assert [reply.unreachable for reply in replies.values()] == [None, None], "they are alike"
    assert job.verdict().phase is JobPhase.SUCCEEDED


DMESG = """
[    1.000000] NVRM: Xid (PCI:0000:10:1c): 13, pid=412, Graphics SM Warp Exception
[    2.000000] NVRM: Xid (PCI:0000:10:1c): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[    3.000000] NVRM: Xid (PCI:0000:a0:1d): 95, pid=1, Uncontained ECC error
"""


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH."""
    found = tmp_path / "bin"
    found.mkdir()
    monkeypatch.setenv("PATH", path(found))
    return found


def test_errors_of_the_driver_that_need_a_reset(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Xid 13 is the error of a program and not of the GPU. On Ubuntu and Amazon Linux only root may read the
    log (kernel.dmesg_restrict)."""
    monkeypatch.setattr(causes, "DRIVER", str(tmp_path))
    (tmp_path / "log").write_text(DMESG)
    found = "the NVIDIA driver has logged Xid 79 (PCI:0000:10:1c), Xid 95 (PCI:0000:a0:1d) since the boot"
    program(bin_folder / "dmesg", f"cat {tmp_path}/log")
    assert preflight.facts(["false"], tmp_path).defects == (found,)
    denied = "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1"
    program(bin_folder / "dmesg", denied)
    program(bin_folder / "sudo", f'[ "$*" = "-n dmesg" ] && cat {tmp_path}/log')
    assert preflight.facts(["false"], tmp_path).defects == (found,)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo active", ()),
        ("echo failed; exit 3", ("nvidia-fabricmanager, which connects the GPUs, is failed",)),
        ("exit 4", ("nvidia-fabricmanager, which connects the GPUs, is not installed",)),
    ],
)
def test_fabric_manager_of_a_machine_with_nvswitch(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(preflight, "NVSWITCH", str(tmp_path))
    program(bin_folder / "systemctl", script)
    assert preflight.facts(["false"], tmp_path).defects == expected


def test_disk_and_shared_memory_that_are_almost_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LEAST_DISK", 1 << 60)
    monkeypatch.setattr(preflight, "LEAST_SHM", 1 << 60)
    disk, shared = preflight.facts(["false"], tmp_path).defects
    assert disk.startswith(f"{tmp_path} has ")
    assert shared.startswith("/dev/shm has ")
    assert all(one.endswith(f" MiB free, and needs {1 << 40}") for one in (disk, shared))
