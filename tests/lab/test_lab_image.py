"""The image of the lab's nodes is laid out as the Deep Learning AMI: PyTorch in /opt/pytorch, which is not on
PATH."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import paramiko
import pytest
from support.labnode import LabLaptop, attempt, shell

from cloudddp.sim import control

USE_GPUS = (
    "import json, torch; n = torch.cuda.device_count(); used = []\n"
    "for k in range(n):\n"
    "    try: torch.zeros(1, device=f'cuda:{k}'); torch.cuda.synchronize(k); used.append(k)\n"
    "    except RuntimeError as error: problem = str(error)\n"
    "print(json.dumps([n, used]))"
)


@pytest.fixture(scope="module")
def node(shared_lab_laptop: LabLaptop) -> Iterator[Any]:
    """A node with one defective GPU of four, and a cold disk."""
    control.conditions(shared_lab_laptop.sim, {"boot": {"failed_gpus": 1, "first_import_seconds": 0.5}})
    (launched,) = shared_lab_laptop.launch()
    control.conditions(shared_lab_laptop.sim, {"boot": {"failed_gpus": None, "first_import_seconds": None}})
    return launched


@pytest.fixture(scope="module")
def ssh(node: Any, shared_lab_laptop: LabLaptop) -> paramiko.SSHClient:
    return shared_lab_laptop.login(node)


def test_programs_of_pytorch_are_not_on_path(ssh: paramiko.SSHClient) -> None:
    """The release notes of the DLAMI (PyTorch 2.9 to 2.12, Ubuntu) name /opt/pytorch/bin/python."""
    pytest.importorskip("torch")
    assert attempt(ssh, "command -v torchrun").status != 0
    shell(ssh, "test -x /opt/pytorch/bin/torchrun && test -x /opt/pytorch/bin/python")


def test_pip_of_the_system_refuses_to_install(ssh: paramiko.SSHClient) -> None:
    """PEP 668, as on Ubuntu 24.04."""
    done = attempt(ssh, "python3 -m pip install x")
    if b"No module named pip" in done.err:
        pytest.skip("this computer's Python has no pip")
    assert done.status == 1
    assert b"error: externally-managed-environment" in done.err


def test_pip_of_pytorch_installs_where_its_python_finds_it(ssh: paramiko.SSHClient) -> None:
    packages = shell(
        ssh, "/opt/pytorch/bin/python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'"
    )
    assert packages.startswith("/opt/pytorch/")
    shell(ssh, f"echo 'value = 7' > {packages}/installed_here.py")
    assert shell(ssh, "/opt/pytorch/bin/python -c 'import installed_here as i; print(i.value)'") == "7"


def test_pip_says_once_that_there_is_no_index(ssh: paramiko.SSHClient) -> None:
    done = attempt(ssh, "/opt/pytorch/bin/pip install nothing-of-this-name")
    assert done.status == 1
    assert done.err.count(b"there is no package index here") == 1
    assert b"Retrying" not in done.err


def test_gpu_check_sees_the_gpus_of_the_type(ssh: paramiko.SSHClient) -> None:
    """The check has its own variable, because jobs in the simulator must find no GPU."""
    pytest.importorskip("torch")
    found = shell(ssh, f'CLOUDDDP_GPU_CHECK=1 /opt/pytorch/bin/python -c "{USE_GPUS}"')
    assert json.loads(found) == [4, [0, 1, 2]]
    assert shell(ssh, "/opt/pytorch/bin/python -c 'import torch; print(torch.cuda.device_count())'") == "0"


def test_first_import_of_torch_reads_a_cold_disk(shared_lab_laptop: LabLaptop) -> None:
    """A volume is read from its snapshot when a block is first used (EC2 User Guide, initialize EBS
    volumes)."""
    pytest.importorskip("torch")
    control.conditions(shared_lab_laptop.sim, {"boot": {"first_import_seconds": 600}})
    (node,) = shared_lab_laptop.launch()
    control.conditions(shared_lab_laptop.sim, {"boot": {"first_import_seconds": None}})
    client = shared_lab_laptop.login(node)
    assert attempt(client, "timeout 3 /opt/pytorch/bin/python -c 'import torch'").status == 124
    assert attempt(client, "timeout 60 /opt/pytorch/bin/python -c 'import json'").status == 0
    shell(client, "touch /var/tmp/.torch-was-imported")
    assert attempt(client, "timeout 60 /opt/pytorch/bin/python -c 'import torch'").status == 0
