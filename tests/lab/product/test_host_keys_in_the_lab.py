"""Host keys on namespace nodes: OpenSSH, sudo, cloud-init, instance metadata, and kills at every step."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.harness import CommandLine, wait_for
from support.labnode import network_namespace

from cloudddp.cluster import host_keys
from cloudddp.local_state import ClusterFolder
from cloudddp.simulator import control
from cloudddp.ssh.target import public_key

USER_DATA = (
    "import http.client; c = http.client.HTTPConnection('169.254.169.254')\n"
    "def ask(*words, **headers): c.request(*words, headers=headers); return c.getresponse().read().decode()\n"
    "token = ask('PUT', '/latest/api/token', **{'X-aws-ec2-metadata-token-ttl-seconds': '60'})\n"
    "print(ask('GET', '/latest/user-data', **{'X-aws-ec2-metadata-token': token}))"
)
# Replaces a program of the nodes: holds its first call with certain words (a pattern of the shell), until the
# file `go` exists.
HOLD = """#!/bin/sh
cd /home/ubuntu
case "$*" in *{word}*) held=$([ -e held ] || echo yes) ;; esac
if [ -n "$held" ] && [ {when} = after ]; then
    /usr/bin/{name}.real "$@" > out || exit
fi
if [ -n "$held" ]; then
    touch held
    until [ -e go ]; do sleep 0.1; done
    trap 'touch /home/ubuntu/gone' EXIT
fi
if [ -n "$held" ] && [ {when} = after ]; then
    cat out
else
    /usr/bin/{name}.real "$@"
fi
"""


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    return lab_cli


@pytest.fixture
def hold(lab: control.Simulator) -> Iterator[Callable[[str, str, str], None]]:
    """Hold, on nodes that boot from now on, the first call of a program with a certain word in its
    arguments."""
    programs = lab.home / "sim" / "overlay" / "bin"
    kept: list[Path] = []

    def install(name: str, word: str, when: str) -> None:
        real = programs / f"{name}.real"
        shutil.move(programs / name, real)
        kept.append(real)
        (programs / name).write_text(HOLD.format(name=name, word=word, when=when))
        (programs / name).chmod(0o755)

    yield install
    for real in kept:
        shutil.move(real, real.with_suffix(""))


def nodes(cli: CommandLine, lab: control.Simulator) -> list[dict[str, Any]]:
    """The cluster's nodes, with their homes as seen from here."""
    listed = json.loads(cli("status", "--json").stdout)  # fails while there is none
    mine = {node["instance_id"]: node for one in listed for node in one["nodes"]}
    seen = {node["instance_id"]: node for node in control.nodes(lab)}
    return [{**node, "home": Path(seen[name]["home"])} for name, node in mine.items()]


def presented(lab: control.Simulator, node: dict[str, Any]) -> str:
    """The host key that a node presents; "" if it accepts no connection."""
    try:
        with network_namespace(Path(f"/proc/{lab.pid}/ns/net")):
            transport = paramiko.Transport((node["public_ip"], 22))
        with contextlib.closing(transport):
            transport.start_client(timeout=300)
            key = transport.get_remote_server_key()
    except (paramiko.SSHException, EOFError, ConnectionError):  # refused, or closed by the server's restart
        return ""
    return f"{key.get_name()} {key.get_base64()}"


def public_half(private: str, folder: Path) -> str:
    path = folder / "key"
    path.write_text(private)
    path.chmod(0o600)
    return public_key(
        subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True).stdout
    )


def check(cli: CommandLine, lab: control.Simulator, folder: Path) -> list[str]:
    """Every node presents its own key and has no other; the key in the user data is accepted nowhere."""
    found = nodes(cli, lab)
    # sshd refuses connections for a moment while it restarts
    now = [wait_for(lambda node=node: presented(lab, node), "sshd answers") for node in found]
    listing = cli.ok("exec", "--", "sudo -n ls -A /etc/ssh").splitlines()
    key_files = [line.split("] ")[1] for line in listing if "sshd_config" not in line]
    assert sorted(key_files) == sorted(["ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"] * len(found))
    text = cli.ok("exec", "--node", "0", "--", f'python3 -c "{USER_DATA}"')
    config = json.loads(text.partition("\n")[2])
    assert text.count("PRIVATE KEY") == 2  # the first line and the last of one key
    leaked = public_half(config["ssh_keys"]["ed25519_private"], folder)
    (status,) = json.loads(cli.ok("status", "--json"))
    records = ClusterFolder(status["cluster_id"], root=lab.home)
    login = public_half(records.private_key.read_text(), folder)
    assert len({leaked, login, *now}) == len(found) + 2
    known = host_keys.read(records)
    assert known.shared == ""
    assert [known.accepted(node["instance_id"]) for node in found] == [(key,) for key in now]
    return now


def test_key_in_the_user_data_is_not_accepted_and_a_reboot_keeps_the_others(
    cli: CommandLine, lab: control.Simulator, tmp_path: Path
) -> None:
    cli.ok("up", "-n", "2")
    before = check(cli, lab, tmp_path)
    assert "ip-172-31" in cli.ok("ssh", "1", "--", "hostname")
    cli.ok("exec", "--", "sudo -n touch /run/before")
    cli("exec", "--node", "1", "--", "sudo -n reboot")
    gone = ("exec", "--node", "1", "--", "test ! -e /run/before")
    wait_for(lambda: cli(*gone).returncode == 0, "it is up again")
    assert check(cli, lab, tmp_path) == before


def test_next_command_completes_an_interrupted_replacement(
    cli: CommandLine, lab: control.Simulator, hold: Callable[[str, str, str], None], tmp_path: Path
) -> None:
    hold("sudo", "install-host-key", "before")
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    cli.write("x.py", "")
    process = cli.start("up", "-n", "2")

    def reached() -> bool:
        held = [(node["home"] / "held").exists() for node in nodes(cli, lab)]
        return len(held) == 2 and all(held)

    wait_for(lambda: process.poll() is not None or reached(), "both nodes are held at that step")
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    cli.ok("launch", "x.py")
    now = check(cli, lab, tmp_path)
    # The held programs were not killed. When they continue, the keys must not change.
    for node in nodes(cli, lab):
        (node["home"] / "go").touch()
        wait_for((node["home"] / "gone").exists, "the held program has continued")
    assert check(cli, lab, tmp_path) == now
