"""Shared folders on nodes, with the simulator's programs: order, links, whose results they are, failures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import Node
from support.packed import packed
from support.programs import program

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.results import NewFilesReply, NewFilesRequest
from cloudddp.agent.protocol.start import SetupReply, SharedFolder
from cloudddp.simulator.hosts.loopback_ssh import stubs
from cloudddp.simulator.hosts.node_spec import UserData

ADDRESSES = ("10.0.0.4", "10.0.0.5", "10.0.0.6")
OWN = SharedFolder("shared", below="shared", clients=(ADDRESSES[1],), owned=True)
OTHER = SharedFolder("shared", f"{ADDRESSES[0]}:/", below="shared")


def set_up(node: Node, *folders: SharedFolder, commands: tuple[str, ...] = ()) -> SetupReply:
    return node.set_up(*commands, shared=folders)


def programs(node: Node, number: int) -> None:
    """Give a node the programs of a node of the simulator; `sudo` also records its arguments."""
    scripts = stubs.scripts(gpus=(), efa_devices=0, user_data=UserData(), address=ADDRESSES[number])
    (node.home.parent / "run").mkdir(parents=True)
    folder = node.home.parent / "bin"
    for name in ("sudo", "findmnt", "exportfs", "mount.nfs4"):
        text = scripts[name].replace("#!/bin/sh\n", f'#!/bin/sh\necho "{name} $*" >> {node.home}/calls\n', 1)
        program(folder / name, text)
    node.variables["PATH"] = f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def pair(node: Node, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes of a simulator; the first one exports."""
    found = []
    for number in (0, 1):
        one = Node(tmp_path / f"nodes/node{number}/home")
        programs(one, number)
        found.append(one)
    yield found[0], found[1]
    for one in found:
        one.end()


def calls(node: Node) -> list[str]:
    return [line for line in (node.home / "calls").read_text().splitlines() if line.startswith("sudo")]


def test_export_comes_before_the_mount_and_that_before_the_setup(pair: tuple[Node, Node]) -> None:
    first, second = pair
    reply = set_up(second, OTHER)
    assert (reply.exit_code, reply.data, reply.command) == (32, True, "[[shared]] shared")
    assert "access denied by server" in reply.output
    assert set_up(first, OWN, commands=("echo here > shared/a",)).exit_code == 0
    assert set_up(second, OTHER, commands=("cat shared/a > seen",)).exit_code == 0
    assert (second.project / "seen").read_text() == "here\n"
    export = f'sudo -n sh -s -- share-folder "{first.home}/cloudddp-shared/node0" {ADDRESSES[1]}('
    (exported,) = calls(first)
    assert exported.startswith(export)
    assert exported.endswith("rw,sync,no_subtree_check,insecure,fsid=0)")
    target = f"{second.home}/cloudddp-shared/{ADDRESSES[0]}__"
    mount = calls(second)[-1]
    assert mount.startswith("sudo -n timeout --signal=KILL 60 mount -t nfs4 -o nfsvers=4.1,")
    assert mount.endswith(f" {ADDRESSES[0]}:/ {target}")
    assert (second.project / "shared").readlink() == Path(target) / "shared"
    assert set_up(second, OTHER).exit_code == 0
    assert len(calls(second)) == 2, "it is mounted once"


def test_first_node_that_was_replaced_is_mounted_anew(
    pair: tuple[Node, Node], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first, second = pair
    set_up(first, OWN)
    assert set_up(second, OTHER).exit_code == 0
    (first.project / "shared/lost").touch()
    third = Node(tmp_path / "nodes/node2/home")
    request.addfinalizer(third.end)
    programs(third, 2)
    set_up(third, OWN)
    moved = SharedFolder("shared", f"{ADDRESSES[2]}:/", below="shared")
    assert set_up(second, moved).exit_code == 0
    assert calls(second)[-2:][0] == f"sudo -n umount --lazy {second.home}/cloudddp-shared/{ADDRESSES[0]}__"
    assert list((second.project / "shared").iterdir()) == []
    (third.project / "shared/new").touch()
    assert (second.project / "shared/new").exists()


def new(node: Node) -> NewFilesReply:
    return node.call(NewFilesRequest("p", (), ()))


def test_results_in_a_shared_folder_are_those_of_the_first_node(pair: tuple[Node, Node]) -> None:
    first, second = pair
    set_up(first, OWN)
    set_up(second, OTHER)
    for number, node in enumerate(pair):
        node.start(f"open('shared/of-{number}', 'w').write('x'); open('own', 'w').write('x')")
        assert node.follow().state.phase is JobPhase.SUCCEEDED
    listed = {path.name for job in new(first).jobs for path in job.outputs.paths}
    assert listed == {"shared/", "own"}
    assert [job.outputs.files for job in new(first).jobs] == [3]
    assert [job.outputs.files for job in new(second).jobs] == [1]
    shared = {"shared/of-0", "shared/of-1"}
    for node, files in ((first, {"own", *shared}), (second, {"own"})):
        selection = NewFilesRequest("p", (), (), node.id(), 1 << 20)
        assert packed(node, ".", selection=selection).files.keys() == files
    assert packed(first, "shared").files.keys() == shared
    assert packed(second, "shared").files == {}, "as an output"
    assert packed(second, "shared", all=True).files.keys() == shared, "by its name"
    for node in pair:
        assert node.end() == []


def test_shared_files_are_not_copied_between_nodes(pair: tuple[Node, Node]) -> None:
    first, _ = pair
    set_up(first, OWN)
    first.start("open('shared/a.pt', 'w').write('x'); open('b.pt', 'w').write('x')")
    assert first.follow().state.phase is JobPhase.SUCCEEDED
    code = (
        "import sys; sys.path.insert(0, {agent!r}); from agent.share import offers; "
        "from cloudddp.agent.protocol.sharing import SnapshotSearch as S; "
        "print([one.path for one in offers.of_node(S('p', (), limit=1 << 20))[0].files], "
        "[one.path for one in offers.of_node(S('p', ('**/*.pt', 'shared/*.pt'), every=True))[0].files])"
    )
    words = [sys.executable, "-IS", "-c", code.format(agent=str(first.agent))]
    out = subprocess.check_output(words, env={**os.environ, "HOME": str(first.home)}, text=True)
    assert out == "['b.pt'] ['b.pt']\n"
    assert first.end() == []


def test_missing_programs_are_installed_first(pair: tuple[Node, Node]) -> None:
    """Those of NFS by apt-get or dnf; the Lustre client by [setup], which then comes before the mount."""
    first, _ = pair
    folder = first.home.parent / "bin"
    lustre = SharedFolder("fsx", "fs-1.fsx.amazonaws.com@tcp:/abc", owned=True)
    reply = set_up(first, lustre)
    assert reply.output.startswith("the Lustre client (mount.lustre) is missing: install it in [setup] run")
    client = folder / "mount.lustre"
    reply = set_up(first, lustre, commands=(f"echo > {client}; chmod +x {client}",))
    assert (reply.exit_code, reply.command) == (32, "[[shared]] fsx"), "mounted after the commands"
    assert "mount -t lustre -o relatime,flock" in calls(first)[-1]
    if shutil.which("exportfs", path="/usr/sbin:/sbin") is None:
        (folder / "exportfs").rename(folder / "not-installed-exportfs")
        (folder / "apt-get").symlink_to("/bin/true")
        assert set_up(first, OWN).exit_code == 0
        assert "sudo -n apt-get -qq install --no-install-recommends nfs-kernel-server" in calls(first)
