"""What a node's boot module gets on stdin, and which programs are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudddp.simulator.conditions.model import Boot
from cloudddp.simulator.hosts.host_setup import HostSetup
from cloudddp.simulator.hosts.machines.boot import MachineNode
from cloudddp.simulator.hosts.machines.kind import Machines
from cloudddp.simulator.hosts.machines.layout import layout_of
from cloudddp.simulator.hosts.namespaces.rootfs import NamespaceNode
from cloudddp.simulator.hosts.node_spec import NodeSpec, UserData
from cloudddp.simulator.linux import programs

SETUP = HostSetup(
    host_name="ip-10-0-0-1",
    disk=Path("/disk of 'a' node\n"),
    state=Path("/state"),
    hosts_file=Path("/hosts"),
    prefix=Path("/prefix"),
    base_prefix=Path("/base"),
    network_commands="link set lo up\naddr add 10.0.0.1/20 dev eth0",
    environment={"A": "1 2"},
)
SPEC = NodeSpec("i-1", "Ubuntu", "10.0.0.1", 20, "02:00:00:00:00:01", None, (), 0, 8, (), UserData(), Boot())


@pytest.mark.parametrize(
    "node",
    [
        NamespaceNode(SETUP, Path("/overlay"), Path("/shared"), shared_memory=1 << 20, as_root=False),
        MachineNode(SETUP, "i-1", Path("/image"), layout_of("Ubuntu", ssh_socket=True, nologin_seconds=1.5)),
    ],
    ids=["namespace", "machine"],
)
def test_node_is_the_same_after_one_line(node: NamespaceNode | MachineNode) -> None:
    line = node.to_line()
    assert "\n" not in line
    assert type(node).from_line(line) == node


def test_damaged_operating_system_is_named_before_a_node_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDDDP_SIM_ROOTS", str(tmp_path))
    machines = Machines(tmp_path)
    with pytest.raises(OSError, match="missing or damaged: `cloudddp sim stop`, then"):
        machines.describe(SPEC, SETUP)


def test_missing_programs_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is no program because it lies in the root folder or the current one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("")
    packages = {
        "etc/passwd": "p1",
        "/etc/passwd": "p2",
        "there": "p3",  # not executable
        str(tmp_path / "gone"): "p4",
    }
    assert programs.missing(packages) == "p1 and p3 and p4 are not installed (apt-get install p1 p3 p4)"
    (tmp_path / "there").chmod(0o755)
    assert programs.missing({"there": "p3"}) == ""
