"""SSH sessions on a loopback node: logins, data, exit status, terminals, SFTP."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.simlab import Laptop, execute, make_key

MIB = 1 << 20


def test_login_checks_host_key_login_key_and_user(node: tuple[Laptop, dict[str, Any]]) -> None:
    laptop, instance = node
    for address in (instance["PrivateIpAddress"], instance["PublicIpAddress"]):
        assert execute(laptop.connect(address), "echo here").out == b"here\n"
    with pytest.raises(paramiko.BadHostKeyException):
        laptop.connect(address, host_key=make_key())
    for other in ({"key": make_key()}, {"user": "root"}):
        with pytest.raises(paramiko.AuthenticationException):
            laptop.connect(address, **other)


def test_command_has_its_own_streams_and_exit_status(ssh: paramiko.SSHClient) -> None:
    data = os.urandom(MIB) * 8
    result = execute(ssh, "cat; echo err >&2; exit 7", data)
    assert (result.status, result.err) == (7, b"err\n")
    assert hashlib.sha256(result.out).digest() == hashlib.sha256(data).digest()
    assert execute(ssh, "kill -KILL $$").status == -1
    assert execute(ssh, "sh -c 'kill -TERM $$'; exit $?").status == 143
    result = execute(ssh, "(sleep 0.3; echo late) & echo early")
    assert (result.status, result.out) == (0, b"early\nlate\n")


def test_working_directory_and_environment(ssh: paramiko.SSHClient, node: Any) -> None:
    os.environ["LEAKED_FROM_THE_TEST"] = "yes"
    variables = dict(
        line.split("=", 1) for line in execute(ssh, "env").out.decode().splitlines() if "=" in line
    )
    assert variables["HOME"].endswith(f"/{node[1]['InstanceId']}/home")
    assert execute(ssh, "pwd -P").out.decode().strip() == os.path.realpath(variables["HOME"])
    assert variables["USER"] == variables["LOGNAME"] == "ubuntu"
    assert not {
        name for name in variables if name.startswith(("AWS_", "VIRTUAL_ENV", "LEAKED", "PYTHONHOME"))
    }
    # `pip install` on a node installs into an environment of the node.
    prefix = execute(ssh, "python3 -c 'import sys, moto; print(sys.prefix)'").out.decode().strip()
    assert prefix == os.path.realpath(f"{variables['HOME']}/../venv")
    del os.environ["LEAKED_FROM_THE_TEST"]


def test_output_precedes_the_exit_status_with_a_full_window(ssh: paramiko.SSHClient) -> None:
    done = Path(execute(ssh, "pwd").out.decode().strip()) / "all written"
    channel = ssh.get_transport().open_session(window_size=1 << 16)
    # More than the client's window (64 KiB), less than window and pipe: the command ends before all is sent.
    channel.exec_command("head -c 100000 /dev/zero; touch 'all written'")
    until(done.exists)
    time.sleep(0.5)  # time for the defect to show
    assert not channel.exit_status_ready()
    assert len(b"".join(iter(lambda: channel.recv(1 << 16), b""))) == 100000
    assert channel.recv_exit_status() == 0


def test_disconnect_closes_the_pipes(node: tuple[Laptop, dict[str, Any]]) -> None:
    laptop, instance = node
    client = laptop.connect(instance["PublicIpAddress"])
    home = Path(execute(client, "pwd").out.decode().strip())
    channel = client.get_transport().open_session()
    channel.exec_command("touch started; cat > /dev/null; touch outlived")
    until((home / "started").exists)
    client.get_transport().sock.close()
    until((home / "outlived").exists)


def test_interactive_shell_and_window_size(ssh: paramiko.SSHClient) -> None:
    channel = ssh.invoke_shell(width=80, height=24)
    channel.settimeout(30)
    channel.resize_pty(width=99, height=33)
    channel.sendall(b"stty size; echo $((40+2)); exit 6\n")
    output = channel.makefile().read()
    assert b"33 99" in output
    assert b"42" in output
    assert channel.recv_exit_status() == 6
