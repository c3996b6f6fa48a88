"""SSH sessions on a loopback node: logins, data, exit status, terminals, SFTP."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.simlab import Laptop, execute, make_key

MIB = 1 << 20


@pytest.mark.parametrize("which", ["PrivateIpAddress", "PublicIpAddress"])
def test_injected_host_key_on_both_addresses(node: tuple[Laptop, dict[str, Any]], which: str) -> None:
    laptop, instance = node
    client = laptop.connect(instance[which])
    assert execute(client, "echo here").out == b"here\n"


def test_wrong_host_key_is_detected(node: tuple[Laptop, dict[str, Any]]) -> None:
    laptop, instance = node
    with pytest.raises(paramiko.BadHostKeyException):
        laptop.connect(instance["PublicIpAddress"], host_key=make_key())


def test_unknown_key_is_refused(node: tuple[Laptop, dict[str, Any]]) -> None:
    laptop, instance = node
    with pytest.raises(paramiko.AuthenticationException):
        laptop.connect(instance["PublicIpAddress"], key=make_key())


def test_unknown_user_is_refused(node: tuple[Laptop, dict[str, Any]]) -> None:
    laptop, instance = node
    with pytest.raises(paramiko.AuthenticationException):
        laptop.connect(instance["PublicIpAddress"], user="root")


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


def test_exit_status(ssh: paramiko.SSHClient) -> None:
    assert execute(ssh, "exit 7").status == 7
    assert execute(ssh, "true").status == 0


def test_killed_command_reports_a_signal(ssh: paramiko.SSHClient) -> None:
    assert execute(ssh, "kill -KILL $$").status == -1


def test_killed_child_of_a_shell(ssh: paramiko.SSHClient) -> None:
    assert execute(ssh, "sh -c 'kill -TERM $$'; exit $?").status == 143


def test_stderr_is_separate(ssh: paramiko.SSHClient) -> None:
    result = execute(ssh, "echo out; echo err >&2")
    assert (result.out, result.err) == (b"out\n", b"err\n")


def test_stdin_of_64_mib(ssh: paramiko.SSHClient) -> None:
    data = os.urandom(MIB) * 64
    result = execute(ssh, "cat; echo done >&2", data)
    assert hashlib.sha256(result.out).digest() == hashlib.sha256(data).digest()
    assert result.err == b"done\n"


def test_stdin_of_a_slow_reader(ssh: paramiko.SSHClient) -> None:
    channel = ssh.get_transport().open_session()
    channel.exec_command("read start; wc -c")
    threading.Thread(target=lambda: (channel.sendall(b"\n" * (32 * MIB)), channel.shutdown_write())).start()
    assert channel.makefile().read() == f"{32 * MIB - 1}\n".encode()


def test_output_precedes_the_exit_status(ssh: paramiko.SSHClient) -> None:
    for _ in range(20):
        channel = ssh.get_transport().open_session()
        channel.exec_command("head -c 300000 /dev/zero; head -c 200000 /dev/zero >&2; exit 5")
        assert channel.recv_exit_status() == 5
        channel.settimeout(0.0)  # data that is missing now came after the status
        assert len(_available(channel.recv)) == 300000
        assert len(_available(channel.recv_stderr)) == 200000
        channel.close()


def test_output_precedes_the_exit_status_with_a_full_window(
    ssh: paramiko.SSHClient,
) -> None:
    done = Path(execute(ssh, "pwd").out.decode().strip()) / "all written"
    channel = ssh.get_transport().open_session(window_size=1 << 16)
    # More than the client's window (64 KiB), less than window and pipe: the command ends before all is sent.
    channel.exec_command("head -c 100000 /dev/zero; touch 'all written'")
    until(done.exists)
    time.sleep(0.5)  # time for the defect to show
    assert not channel.exit_status_ready()
    assert len(b"".join(iter(lambda: channel.recv(1 << 16), b""))) == 100000
    assert channel.recv_exit_status() == 0


def _available(receive: Any) -> bytes:
    parts = []
    try:
        while part := receive(1 << 20):
            parts.append(part)
    except TimeoutError:
        pass
    return b"".join(parts)


def test_unread_input_does_not_block(ssh: paramiko.SSHClient) -> None:
    result = execute(ssh, "head -c 3; exec 0<&-; echo; sleep 0.2; echo end", b"abc" * (8 * MIB))
    assert result.out == b"abc\nend\n"


def test_exit_status_with_a_background_process(ssh: paramiko.SSHClient) -> None:
    channel = ssh.get_transport().open_session()
    channel.exec_command("sleep 3600 & echo early; exit 4")
    assert channel.recv_exit_status() == 4
    assert channel.recv(100) == b"early\n"
    channel.close()


def test_output_of_a_background_process(ssh: paramiko.SSHClient) -> None:
    result = execute(ssh, "(sleep 0.3; echo late) & echo early")
    assert (result.status, result.out) == (0, b"early\nlate\n")


def test_disconnect_closes_the_pipes(
    node: tuple[Laptop, dict[str, Any]],
) -> None:
    laptop, instance = node
    client = laptop.connect(instance["PublicIpAddress"])
    home = Path(execute(client, "pwd").out.decode().strip())
    channel = client.get_transport().open_session()
    channel.exec_command("touch started; cat > /dev/null; touch outlived")
    until((home / "started").exists)
    client.get_transport().sock.close()
    until((home / "outlived").exists)


def test_twelve_channels_on_one_connection(ssh: paramiko.SSHClient) -> None:
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda n: execute(ssh, f"cat; exit {n}", b"x" * MIB), range(12)))
    assert [result.status for result in results] == list(range(12))
    assert {result.out for result in results} == {b"x" * MIB}


def test_terminal(ssh: paramiko.SSHClient) -> None:
    channel = ssh.get_transport().open_session()
    channel.get_pty(term="vt100", width=101, height=37)
    channel.exec_command("test -t 0 -a -t 1 -a -t 2 && stty size && echo $TERM; exit 3")
    assert channel.makefile().read().split() == [b"37", b"101", b"vt100"]
    assert channel.recv_exit_status() == 3


def test_interactive_shell_and_window_size(ssh: paramiko.SSHClient) -> None:
    channel = ssh.invoke_shell(width=80, height=24)
    channel.settimeout(30)
    channel.resize_pty(width=99, height=33)
    channel.sendall(b"stty size; echo $((40+2)); exit 6\n")
    output = channel.makefile().read()
    assert b"33 99" in output
    assert b"42" in output
    assert channel.recv_exit_status() == 6


def test_sftp_starts_in_home(ssh: paramiko.SSHClient) -> None:
    with ssh.open_sftp() as sftp:
        with sftp.open("by-sftp", "wb") as file:
            file.write(b"content")
        assert sftp.normalize(".") == execute(ssh, "pwd -P").out.decode().strip()
    assert execute(ssh, "cat by-sftp").out == b"content"


def test_sftp_exit_status(ssh: paramiko.SSHClient) -> None:
    sftp = ssh.open_sftp()
    channel = sftp.get_channel()
    channel.shutdown_write()
    assert channel.recv_exit_status() == 0
    sftp.close()


def test_unix_socket_in_tmpdir(ssh: paramiko.SSHClient) -> None:
    script = (
        "import socket,tempfile,os; d=tempfile.mkdtemp(prefix='pymp-');"
        "socket.socket(socket.AF_UNIX).bind(os.path.join(d,'listener-01234567'))"
    )
    result = execute(ssh, f'python3 -c "{script}"')
    assert result.status == 0, result.err


def test_nvidia_smi_lists_gpus_of_the_type(ssh: paramiko.SSHClient) -> None:
    lines = execute(ssh, "nvidia-smi -L").out.decode().splitlines()
    assert lines == [f"GPU {index}: NVIDIA A10G (simulated)" for index in range(4)]


@pytest.mark.parametrize(
    "command", ["sudo true", "poweroff", "shutdown now", "reboot", "systemctl daemon-reload"]
)
def test_commands_that_change_the_machine_are_refused(ssh: paramiko.SSHClient, command: str) -> None:
    result = execute(ssh, command)
    assert result.status == 1
    assert result.err.startswith(b"simulated node: ")
    assert result.err.count(b"\n") == 1


def test_cloud_init_status(ssh: paramiko.SSHClient) -> None:
    assert execute(ssh, "cloud-init status --wait").out == b"status: done\n"


def test_unknown_unit_is_inactive(ssh: paramiko.SSHClient) -> None:
    result = execute(ssh, "systemctl is-active cloudddp-deadline.timer")
    assert (result.status, result.out) == (3, b"inactive\n")
