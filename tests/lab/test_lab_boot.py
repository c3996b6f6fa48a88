"""Slow and broken boots in the lab (the condition `boot`): what a client of EC2 meets in the first minutes of
a node."""

from __future__ import annotations

import paramiko
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
