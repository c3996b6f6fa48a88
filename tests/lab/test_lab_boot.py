"""Slow and broken boots in the lab (the condition `boot`): what a client of EC2 meets in the first minutes of
a node."""

from __future__ import annotations

import json
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, inside, shell
from support.simlab import Laptop


def test_pam_refuses_logins_while_nologin_exists(lab_laptop: LabLaptop) -> None:
    """OpenSSH with the node's own PAM: the key is accepted, then the account is refused, and sshd closes the
    connection within the authentication (auth2.c, userauth_finish; pam_nologin(8)). Root may log in, ubuntu
    not."""
    node = lab_laptop.booting({"nologin_seconds": 3})
    refusals: list[Exception] = []

    def login() -> paramiko.SSHClient | None:
        try:
            with inside(lab_laptop.sim):
                return Laptop.connect(lab_laptop, node["PublicIpAddress"])
        except paramiko.AuthenticationException as error:
            refusals.append(error)
        except (paramiko.ssh_exception.NoValidConnectionsError, TimeoutError):
            pass
        return None

    client = until(login)
    assert refusals
    assert {str(one) for one in refusals} == {"Authentication failed: transport shut down or saw EOF"}
    log = shell(client, "sudo cat /var/log/auth.log")
    assert "Accepted publickey for ubuntu" in log
    assert "Access denied for user ubuntu by PAM account configuration" in log
    assert attempt(client, "test -e /run/nologin").status != 0


def test_bootcmd_runs_before_logind_and_sshd(lab_laptop: LabLaptop) -> None:
    """bootcmd runs in cloud-init's network stage, before sysinit.target (cloud-init-network.service): there
    is no bus for logind's ScheduleShutdown, while systemd answers root on its private socket."""
    commands = [
        "shutdown -P +60 2> /root/shutdown; echo $? >> /root/shutdown",
        "printf '[Timer]\\nOnBootSec=1h\\n' > /etc/systemd/system/late.timer",
        "printf '[Service]\\nExecStart=/bin/true\\n' > /etc/systemd/system/late.service",
        "systemctl daemon-reload && systemctl start --no-block late.timer; echo $? > /root/systemctl",
        "pgrep -x sshd; echo $? > /root/sshd",
    ]
    (node,) = lab_laptop.launch(UserData=lab_laptop.user_data(bootcmd=commands))
    client = lab_laptop.login(node)
    assert shell(client, "sudo cat /root/shutdown") == (
        "Failed to poweroff: Failed to connect to bus: No such file or directory\n1"
    )
    assert shell(client, "sudo cat /root/systemctl /root/sshd") == "0\n1"
    assert shell(client, "systemctl is-active late.timer") == "active"
    assert attempt(client, "sudo shutdown -P +60 && sudo shutdown -c").status == 0


# -- the image: laid out as the Deep Learning AMI, with PyTorch in /opt/pytorch, which is not on PATH --------


USE_GPUS = (
    "import json, torch; n = torch.cuda.device_count(); used = []\n"
    "for k in range(n):\n"
    "    try: torch.zeros(1, device=f'cuda:{k}'); torch.cuda.synchronize(k); used.append(k)\n"
    "    except RuntimeError as error: problem = str(error)\n"
    "print(json.dumps([n, used]))"
)


@pytest.fixture(scope="module")
def ssh(shared_lab_laptop: LabLaptop, node: Any) -> paramiko.SSHClient:
    return shared_lab_laptop.login(node)


@pytest.fixture(scope="module")
def node(shared_lab_laptop: LabLaptop) -> Any:
    """A node with one defective GPU of four, and a cold disk."""
    return shared_lab_laptop.booting({"failed_gpus": 1, "first_import_seconds": 600})


def test_pytorch_is_not_on_path_and_reads_a_cold_disk_first(ssh: paramiko.SSHClient) -> None:
    """The release notes of the DLAMI (PyTorch 2.9 to 2.12, Ubuntu) name /opt/pytorch/bin/python. A volume is
    read from its snapshot when a block is first used (EC2 User Guide, initialize EBS volumes)."""
    pytest.importorskip("torch")
    assert attempt(ssh, "command -v torchrun").status != 0
    shell(ssh, "test -x /opt/pytorch/bin/torchrun && test -x /opt/pytorch/bin/python")
    assert attempt(ssh, "timeout 3 /opt/pytorch/bin/python -c 'import torch'").status == 124
    assert attempt(ssh, "timeout 60 /opt/pytorch/bin/python -c 'import json'").status == 0
    shell(ssh, "touch /var/tmp/.torch-was-imported")
    # The check has its own variable, because jobs in the simulator must find no GPU.
    found = shell(ssh, f'CLOUDDDP_GPU_CHECK=1 /opt/pytorch/bin/python -c "{USE_GPUS}"')
    assert json.loads(found) == [4, [0, 1, 2]]
    assert shell(ssh, "/opt/pytorch/bin/python -c 'import torch; print(torch.cuda.device_count())'") == "0"


def test_failed_gpu_is_lost_by_nvidia_smi_until_the_next_boot(
    shared_lab_laptop: LabLaptop, node: Any, ssh: paramiko.SSHClient
) -> None:
    """nvidia-smi(1): 15, the GPU has fallen off the bus; the others are listed."""
    done = attempt(ssh, "nvidia-smi -L")
    lines = done.out.decode().splitlines()
    assert done.status == 15
    assert sum(line.startswith("GPU ") for line in lines) == 3
    assert lines[3] == "Unable to determine the device handle for GPU 00000000:03:00.0: Unknown Error"
    shared_lab_laptop.ec2.reboot_instances(InstanceIds=[node["InstanceId"]])

    def whole() -> bool:
        try:
            return attempt(shared_lab_laptop.login(node), "nvidia-smi -L").status == 0
        except (OSError, EOFError, paramiko.SSHException):
            return False

    until(whole)
