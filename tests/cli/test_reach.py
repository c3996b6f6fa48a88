"""`ssh-config` and `forward`: the nodes for OpenSSH, rsync, scp and an editor, and their ports here."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import urllib.request
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import free_port
from support.harness import CommandLine, cannot, instances_of, interrupt
from support.web import Handler, Server


def openssh(*programs: str) -> None:
    for program in ("ssh", *programs):
        if shutil.which(program) is None:
            cannot(f"{program} is not installed")


def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, **more)


def loopback_only(port: int) -> bool:
    """Whether exactly one socket listens on the port, on 127.0.0.1 (/proc/net/tcp, tcp6: state 0A)."""
    text = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for line in text.splitlines()]
    found = [words[1] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"]
    return found == [f"0100007F:{port:04X}"]


class Page(Handler, BaseHTTPRequestHandler):
    """What listens on the loopback of a process node, which is this computer's."""

    def do_GET(self) -> None:
        self.answer(200, b"x" * 5_000_000)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return bytes(answer.read())


def test_openssh_rsync_and_scp_reach_the_nodes_by_name(cli: Any, tmp_path: Path) -> None:
    """What the user's file says of every host does not count. OpenSSH splits the value of an option at spaces
    and expands `%`, and macOS has a space in every state folder."""
    openssh("rsync", "scp")
    cli.nodes(2)
    assert (
        "no node has a name yet: `cloudddp" in cli("ssh-config", CLOUDDDP_HOME=str(tmp_path / "new")).stderr
    )
    odd = tmp_path / 'Application Support "100%d" [$x] *'
    odd.symlink_to(cli.env["CLOUDDDP_HOME"])
    cli.env.update(CLOUDDDP_HOME=str(odd), HOME=str(tmp_path))
    user = tmp_path / ".ssh" / "config"
    user.parent.mkdir(0o700)
    assert cli.ok("ssh", "1", "echo reached") == "reached\n"
    line = cli.ok("ssh-config")
    assert line.startswith('Include "')
    user.write_text(f"{line}Host *\n  ForwardAgent yes\n  User root\n  StrictHostKeyChecking no")

    one = f"{cli.cluster}-1"
    asked = run("ssh", "-F", str(user), "-G", one).stdout
    assert {"user ubuntu", "forwardagent no", "stricthostkeychecking true"} <= set(asked.splitlines()), asked
    done = run("ssh", "-F", str(user), one, "echo here > there; pwd")
    node = cli.ok("exec", "--node", "1", "--", "cd; pwd")
    assert (done.returncode, done.stdout) == (0, node), done.stderr
    assert "here" in cli.ok("exec", "--node", "1", "--", "cat ~/there")
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "a file").write_text("by rsync")
    assert run("rsync", "-a", "-e", f"ssh -F {user}", f"{sent}/", f"{one}:got/").returncode == 0
    assert run("scp", "-q", "-F", str(user), f"{one}:got/a file", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_text() == "by rsync"


def test_ports_lead_to_the_node_until_ctrl_c(cli: Any) -> None:
    """They listen on the loopback only. Several connections at a time; large answers arrive whole."""
    cli.nodes(2)
    one, other = free_port(), free_port()
    done = cli("forward", f"{one}:1", str(other), "--node", "1")
    assert (done.returncode, done.stdout, "process nodes share" in done.stderr) == (2, "", True)
    with closing(Server(Page)) as server:
        remote = server.server_port
        process = cli.start("forward", f"{one}:{remote}", f"{other}:{remote}", "--node", "1")
        assert process.stdout.readline() == f"http://127.0.0.1:{one} is port {remote} of node 1\n"
        process.stdout.readline()
        assert loopback_only(one)
        assert loopback_only(other)
        sizes: list[int] = []
        urls = [f"http://127.0.0.1:{port}/page" for port in (one, other) * 3]
        threads = [threading.Thread(target=lambda url=url: sizes.append(len(fetch(url)))) for url in urls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sizes == [5_000_000] * 6
    with pytest.raises(OSError):  # the connection is closed, or reset
        fetch(urls[0])  # nothing listens on the node any more
    code, _, err = interrupt(process)
    assert (code, f"port {remote} of node 1 does not answer" in err) == (0, True), err
    assert not loopback_only(one)


def test_lost_connection_ends_the_forwarding(cli: Any, ec2: Any) -> None:
    cli.nodes(1)
    process = cli.start("forward", f"{free_port()}:1")
    assert process.stdout.readline()
    ec2.terminate_instances(InstanceIds=instances_of(ec2, cli.cluster))
    _, err = process.communicate(timeout=300)
    assert (process.returncode, "the SSH connection broke" in err, "forward" in err) == (1, True, True), err


def test_port_in_use_is_named(line: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        err = line.fails(2, "forward", f"{port}:80")
    assert f"cannot listen on port {port} of this computer" in err
    assert "LOCAL:80" in err
