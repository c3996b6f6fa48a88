"""No credential, key or SSH agent of this computer reaches a node: not its disk, the environment and
arguments of its processes, or its user data."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import CommandLine, cannot, clean_environment, wait_for
from support.userdata import of_instance

from cloudddp.simulator import control

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAOFTHISCOMPUTER",
    "AWS_SECRET_ACCESS_KEY": "the-secret-access-key-of-this-computer",
    "AWS_SESSION_TOKEN": "the-session-token-of-this-computer",
    "HF_TOKEN": "a-token-in-the-environment-of-this-computer",
    "LC_MINE": "a-variable-that-the-configuration-of-ssh-sends",
}
MARKER = "a marker in the code of the project"
# Reads what the login user and root can read of the node's processes.
LOOK = f"""
import pathlib, subprocess
marker = {MARKER!r}
pathlib.Path('runs').mkdir()
read = 'cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline'
seen = [subprocess.run([*who, 'sh', '-c', read], capture_output=True).stdout for who in ([], ['sudo', '-n'])]
pathlib.Path('runs/seen').write_bytes(b''.join(seen))
"""


@pytest.fixture
def cli(lab: control.Simulator, project: Path, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line as for AWS: credentials in the environment and in files, and no CLOUDDDP_SIM."""
    home = tmp_path / "home"
    for name, text in {
        ".ssh/id_ed25519": "the-login-key-of-this-user",
        ".aws/credentials": "[default]\naws_secret_access_key = the-secret-in-the-file\n",
        ".netrc": "machine example.com password the-password-in-netrc\n",
    }.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    line = CommandLine(
        project,
        "secrets",
        clean_environment(
            **{**control.environment(lab), **CREDENTIALS},
            HOME=str(home),
            CLOUDDDP_HOME=str(lab.home),
            CLOUDDDP_CLUSTER="secrets",
            CLOUDDDP_YES="1",
        ),
        before_exec=lambda: control.enter(lab),
    )
    yield line
    line.end()
    line.ok("down", "-y")


def secrets(cli: CommandLine, cluster_id: str) -> list[bytes]:
    """What no node may contain: the values above, those in files, and every line of the private login key."""
    home = Path(cli.env["HOME"])
    login = next((Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster_id).glob("id_*[!b]"))
    values = [
        *CREDENTIALS.values(),
        *(path.read_text().split()[-1] for path in home.rglob("*") if path.is_file()),
    ]
    values += login.read_text().splitlines()[2:-1]  # the first line of all such keys is the same
    return [value.encode() for value in values]


def files(root: Path) -> dict[Path, bytes]:
    """The files on a node's own file systems, without those that it shares with this computer."""
    own = {(root / name).stat().st_dev for name in (".", "run", "root", "dev/shm")}
    found = {}
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if (Path(folder) / name).lstat().st_dev in own]
        for name in names:
            path = Path(folder) / name
            if stat.S_ISREG(path.lstat().st_mode):
                found[path] = path.read_bytes()
    return found


def output_of_an_eager_ssh(cli: CommandLine, lab: control.Simulator, folder: Path) -> str:
    """Return what `cloudddp ssh` shows of the node's environment, for a user who has an agent and whose
    configuration of OpenSSH sends everything. OpenSSH does not use $HOME: it is mounted over that of this
    machine, for this process only."""
    if not Path("/etc/ssh/ssh_config").is_file():
        cannot("OpenSSH's configuration /etc/ssh/ssh_config is missing")
    eager, socket = folder / "ssh_config", folder / "agent"
    eager.write_text("ForwardAgent yes\nSendEnv LC_*\nLocalForward 127.0.0.1:45871 127.0.0.1:22\n")
    mount = 'mount --bind "$0" /etc/ssh/ssh_config && exec "$@"'
    covered = ["unshare", "--mount", "sh", "-c", mount, str(eager)]
    show = "env; ls -d /tmp/ssh-* 2>/dev/null; true"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        wait_for(socket.exists, "the agent listens")
        done = subprocess.run(
            [*covered, sys.executable, "-m", "cloudddp", "ssh", "0", "--", show],
            cwd=cli.cwd,
            env={**cli.env, "SSH_AUTH_SOCK": str(socket)},
            capture_output=True,
            text=True,
            timeout=300,
            preexec_fn=lambda: control.enter(lab),
        )
    finally:
        agent.terminate()
        agent.wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_local_credential_or_key_is_on_a_node(
    cli: CommandLine, lab: control.Simulator, tmp_path: Path
) -> None:
    """Nor an SSH agent: a node could use a forwarded one to log in as this user elsewhere."""
    cli.write("look.py", LOOK)
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\noutputs = ["runs"]\n')
    cli.ok("up", "-n", "2")
    cli.ok("launch", "look.py")
    cli.ok("exec", "--", "true")
    (status,) = json.loads(cli.ok("status", "--json"))
    forbidden = secrets(cli, status["cluster_id"])
    assert len(forbidden) > len(CREDENTIALS) + 3  # the login key has several lines
    homes = {n["instance_id"]: Path(n["home"]) for n in control.nodes(lab)}
    roots = [homes[node["instance_id"]].parents[1] for node in status["nodes"]]
    assert len(roots) == 2
    for root in roots:
        there = files(root)
        (seen,) = [data for path, data in there.items() if path.name == "seen"]
        assert b"\0RANK=" in seen  # proof that the search reads processes and files
        assert any(MARKER.encode() in data for data in there.values())
        for value in forbidden:
            assert [path for path, data in there.items() if value in data] == []
    for node in status["nodes"]:
        data = of_instance(lab, node["instance_id"])
        assert b"ssh-ed25519 " in data
        assert [value for value in forbidden if value in data] == []
    shown = output_of_an_eager_ssh(cli, lab, tmp_path)
    assert "SSH_CONNECTION=" in shown
    assert re.findall("SSH_AUTH_SOCK.*|LC_MINE.*|/tmp/ssh-.*", shown) == []
