"""The simulator's images and nodes: names, files, what a boot module gets on stdin, and missing programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.localsync import put

from cloudddp.simulator.conditions.model import Boot
from cloudddp.simulator.hosts.host_setup import HostSetup
from cloudddp.simulator.hosts.machines.boot import MachineNode, pythons
from cloudddp.simulator.hosts.machines.kind import Machines
from cloudddp.simulator.hosts.machines.layout import layout_of, write
from cloudddp.simulator.hosts.namespaces.rootfs import NamespaceNode
from cloudddp.simulator.hosts.node_spec import NodeSpec, UserData
from cloudddp.simulator.linux import programs

PATHS = {name: Path(f"/{name}") for name in ("state", "hosts_file", "prefix", "base_prefix")}
SETUP = HostSetup(
    host_name="ip-10-0-0-1",
    disk=Path("/disk of 'a' node\n"),
    network_commands="link set lo up\naddr add 10.0.0.1/20 dev eth0",
    environment={"A": "1 2"},
    **PATHS,
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
    # `there` is not executable.
    packages = {"etc/passwd": "p1", "/etc/passwd": "p2", "there": "p3", str(tmp_path / "gone"): "p4"}
    assert programs.missing(packages) == "p1 and p3 and p4 are not installed (apt-get install p1 p3 p4)"
    (tmp_path / "there").chmod(0o755)
    assert programs.missing({"there": "p3"}) == ""


# -- the files that a machine node has beyond Debian 13; tests/witness boots them ----------------------------


ENABLED = "etc/systemd/system/multi-user.target.wants/ssh.service"
SOCKET = "etc/systemd/system/sockets.target.wants/ssh.socket"
LATE = "etc/systemd/system/systemd-user-sessions.service.d/late.conf"
PYTHON = "usr/local/bin/python3"
BASIC = "usr/lib/sysusers.d/basic.conf"
UBUNTU = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)"
AMAZON = "Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system with what the image has of these files."""
    put(tmp_path, {ENABLED: "", BASIC: "g sudo 27\ng adm 4\n", "etc/group": "adm:x:4:\nsudo:x:27:\n"})
    put(tmp_path, {"etc/gshadow": "adm:*::\nsudo:*::\n"})
    return tmp_path


def build(root: Path, image: str, *, ssh_socket: bool = False, nologin_seconds: float = 0) -> set[str]:
    """Return the files that are there now."""
    layout = layout_of(image, ssh_socket=ssh_socket, nologin_seconds=nologin_seconds)
    write(root, layout, environment={"A": "1 2"}, host_name="ip-10-0-0-1")
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or path.is_file()}


@pytest.mark.parametrize(
    ("image", "user", "groups"),
    [(UBUNTU, "ubuntu", "[adm, sudo]"), (AMAZON, "ec2-user", "[adm, wheel, systemd-journal]")],
)
def test_login_user_is_that_of_the_image(root: Path, image: str, user: str, groups: str) -> None:
    build(root, image)
    lines = (root / "etc/cloud/cloud.cfg.d/90_simulator.cfg").read_text().splitlines()
    assert {f"    name: {user}", f"    groups: {groups}"} <= set(lines)
    assert (root / "etc/environment").read_text() == 'A="1 2"\n'
    assert (root / "etc/hostname").read_text() == "ip-10-0-0-1\n"


@pytest.mark.parametrize(
    ("conditions", "there", "missing"),
    [
        ({}, {ENABLED}, {SOCKET, LATE, PYTHON}),
        ({"ssh_socket": True}, {SOCKET}, {ENABLED, LATE}),
        ({"nologin_seconds": 3}, {ENABLED, LATE}, {SOCKET}),
    ],
)
def test_conditions_of_a_boot(
    root: Path, conditions: dict[str, int], there: set[str], missing: set[str]
) -> None:
    found = build(root, UBUNTU, **conditions)
    assert there <= found
    assert not missing & found
    if "nologin_seconds" in conditions:
        assert "sleep 3\n" in (root / LATE).read_text()


def test_amazon_linux_has_wheel_and_python_3_9(root: Path) -> None:
    assert PYTHON in build(root, AMAZON)
    assert (root / PYTHON).readlink() == Path("/usr/bin/python3.9")
    assert (root / "etc/group").read_text() == "adm:x:4:\nwheel:x:1010:\n"
    assert (root / "etc/gshadow").read_text() == "adm:*::\n"
    assert (root / "etc/sysusers.d/basic.conf").read_text() == "g adm 4\n"


@pytest.mark.parametrize(
    ("prefix", "base", "found"),
    [
        ("/me/.venv", "/opt/python", ["/opt/python", "/me/.venv"]),
        ("/usr/local", "/usr/local", ["/usr/local"]),
        ("/me/.venv", "/usr", ["/me/.venv", "/usr/bin/VERSION", "/usr/lib/VERSION"]),
    ],
)
def test_parts_of_this_computers_python_that_a_node_gets(
    prefix: str, base: str, found: list[str], tmp_path: Path
) -> None:
    """/usr as a whole is the machine's own, and so are its programs of the same version."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    expected = [Path(one.replace("VERSION", version)) for one in found]
    assert pythons(Path(prefix), Path(base), tmp_path) == expected
    for name in ("bin", "lib"):
        (tmp_path / "usr" / name / version).mkdir(parents=True)
    own = [one for one in expected if one.name != version]
    assert pythons(Path(prefix), Path(base), tmp_path) == own
