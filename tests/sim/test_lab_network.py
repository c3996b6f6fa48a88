"""The lab's network: addresses are EC2's, faults break what they say, nothing gets out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import LabLaptop, attempt, call, inside, reachable, serve, shell
from simlab import until

from cloudddp.errors import UsageError
from cloudddp.sim import control, processes


@pytest.fixture(scope="module")
def pair(neighbour: LabLaptop) -> Iterator[tuple[Any, Any]]:
    """Two nodes of one group, with a server that tells who calls on port 4000 of each."""
    nodes = neighbour.launch(2)
    for node in nodes:
        serve(neighbour.login(node))
    yield nodes[0], nodes[1]


# -- addresses -------------------------------------------------------------------------------------------------


def test_a_node_has_the_address_and_the_mac_that_ec2_gave_it(neighbour: LabLaptop, pair: Any) -> None:
    for node in pair:
        shown = shell(
            neighbour.login(node), "ip -o -4 addr show dev ens5; cat /sys/class/net/ens5/{address,mtu}"
        )
        assert f"inet {node['PrivateIpAddress']}/20" in shown
        assert node["NetworkInterfaces"][0]["MacAddress"] in shown
        assert shown.endswith("9001")
        assert shell(neighbour.login(node), "hostname") == node["PrivateDnsName"].partition(".")[0]


def test_nodes_call_each_other_by_private_address_and_by_name(neighbour: LabLaptop, pair: Any) -> None:
    first, second = pair
    until(lambda: call(neighbour, first, second["PrivateIpAddress"]) == first["PrivateIpAddress"])
    name = second["PrivateDnsName"].partition(".")[0]
    until(lambda: call(neighbour, first, name) == first["PrivateIpAddress"])


def test_the_laptop_reaches_public_addresses_and_no_private_one(lab: control.Simulator, pair: Any) -> None:
    node = pair[0]
    assert reachable(lab, node["PublicIpAddress"], 22)
    assert not reachable(lab, node["PrivateIpAddress"], 22)


def test_nothing_gets_out_of_the_lab(neighbour: LabLaptop, lab: control.Simulator, pair: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        for address in ("127.0.0.1", "203.0.113.10", "192.0.2.1", "198.51.100.254"):
            assert call(neighbour, pair[0], address, port, seconds=0.5) == ""
    with inside(lab):
        routes = subprocess.run(["ip", "-o", "route"], capture_output=True, text=True, check=True).stdout
    assert "default" not in routes


def test_interfaces_take_the_names_that_were_asked_for_in_turn(home: Path) -> None:
    sim = control.start(home, nodes="namespace", interfaces=("ens5", "enp71s0"))
    laptop = LabLaptop(sim, "key")
    names = [shell(laptop.login(node), "ls /sys/class/net") for node in laptop.launch(2)]
    assert sorted(name.replace("lo", "").strip() for name in names) == ["enp71s0", "ens5"]


# -- faults ----------------------------------------------------------------------------------------------------


def test_a_node_that_is_cut_off_is_silent_and_runs_on(resident: LabLaptop) -> None:
    first, second = resident.launch(2)
    resident.login(second)  # its sshd listens
    ssh = resident.login(first)
    beating = "nohup sh -c 'while true; do date +%s%N > beat; sleep 0.05; done' > /dev/null 2>&1 &"
    shell(ssh, f"{beating} until [ -s beat ]; do sleep 0.05; done")
    control.fault(resident.sim, "cut", [first["InstanceId"]])
    assert not reachable(resident.sim, first["PublicIpAddress"], 22)
    assert reachable(resident.sim, second["PublicIpAddress"], 22)
    assert resident.describe(first["InstanceId"])[0]["State"]["Name"] == "running"
    beat = (
        Path(next(n["home"] for n in control.nodes(resident.sim) if n["instance_id"] == first["InstanceId"]))
        / "beat"
    )
    before = beat.read_text()
    until(lambda: beat.read_text() not in ("", before))
    control.fault(resident.sim, "heal", [first["InstanceId"]])
    until(lambda: reachable(resident.sim, first["PublicIpAddress"], 22))


def test_two_nodes_are_cut_off_from_each_other_and_from_nobody_else(resident: LabLaptop) -> None:
    a, b, c = resident.launch(3)
    for node in (a, b, c):
        resident.login(node)  # each sshd listens
    control.fault(resident.sim, "cut-between", [a["InstanceId"], b["InstanceId"]])
    assert call(resident, a, b["PrivateIpAddress"], 22, seconds=1) == ""
    assert call(resident, b, a["PrivateIpAddress"], 22, seconds=1) == ""
    until(lambda: call(resident, a, c["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))
    control.fault(resident.sim, "heal", [a["InstanceId"]])
    until(lambda: call(resident, a, b["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))


def test_a_frozen_node_takes_connections_and_says_nothing(resident: LabLaptop) -> None:
    (node,) = resident.launch(1)
    resident.login(node)
    control.fault(resident.sim, "freeze", [node["InstanceId"]])
    with (
        inside(resident.sim),
        socket.create_connection((node["PublicIpAddress"], 22), timeout=2) as connection,
    ):
        with pytest.raises(TimeoutError):
            connection.recv(10)
        control.fault(resident.sim, "heal", [node["InstanceId"]])
        connection.settimeout(20)
        assert connection.recv(4) == b"SSH-"


def test_a_killed_node_is_terminated_by_ec2_without_a_word(resident: LabLaptop) -> None:
    (node,) = resident.launch(1)
    ssh = resident.login(node)
    shell(ssh, "nohup setsid sleep 1000 > /dev/null 2>&1 &")
    control.fault(resident.sim, "kill", [node["InstanceId"]])
    shown = until(
        lambda: (i := resident.describe(node["InstanceId"])[0])["State"]["Name"] == "terminated" and i
    )
    assert shown["StateReason"]["Code"] == "Server.InternalError"
    assert node["InstanceId"] not in {p.node for p in processes.belonging(resident.sim.home)}


def test_a_full_disk_refuses_every_byte_until_it_is_healed(resident: LabLaptop) -> None:
    (node,) = resident.launch(1)
    ssh = resident.login(node)
    shell(ssh, "echo kept > before")
    control.fault(resident.sim, "fill-disk", [node["InstanceId"]])
    done = attempt(ssh, "head -c 100000 /dev/zero > more")
    assert done.status != 0
    assert b"No space left on device" in done.err
    control.fault(resident.sim, "heal", [node["InstanceId"]])
    assert shell(ssh, "head -c 100000 /dev/zero > more && cat before") == "kept"


def test_ssh_packets_can_be_lost_while_the_rest_gets_through(resident: LabLaptop) -> None:
    first, second = resident.launch(2)
    serve(resident.login(second))
    ssh = resident.login(first)
    control.fault(resident.sim, "drop-ssh", [second["InstanceId"]])
    assert not reachable(resident.sim, second["PublicIpAddress"], 22)
    code = f"import socket;print(socket.create_connection(('{second['PrivateIpAddress']}',4000),5).recv(99).decode())"
    assert shell(ssh, f'python3 -c "{code}"') == first["PrivateIpAddress"]


def test_slow_ssh_is_slow_and_works(resident: LabLaptop) -> None:
    (node,) = resident.launch(1)
    ssh = resident.login(node)

    def seconds() -> float:
        began = time.monotonic()
        assert len(shell(ssh, "head -c 40000 /dev/zero | tr '\\0' x")) == 40000
        return time.monotonic() - began

    quick = min(seconds() for _ in range(3))
    control.fault(resident.sim, "slow-ssh", [node["InstanceId"]])
    assert seconds() > max(
        2.0, 5 * quick
    )  # the line lets 4 KB a second through: no machine is that slow by itself


@pytest.mark.parametrize(
    ("kind", "nodes", "said"),
    [
        ("explode", ["0"], "faults: kill, cut"),
        ("cut", ["i-0nowhere"], "nodes: "),
        ("cut-between", ["0"], "two nodes"),
    ],
)
def test_an_unknown_fault_or_node_is_refused_with_what_there_is(
    lab: control.Simulator, pair: Any, kind: str, nodes: list[str], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        control.fault(lab, kind, nodes)


# -- the lab itself --------------------------------------------------------------------------------------------


def test_a_killed_simulator_leaves_nothing_after_stop(home: Path) -> None:
    sim = control.start(home, nodes="namespace")
    laptop = LabLaptop(sim, "key")
    for node in laptop.launch(2):
        shell(laptop.login(node), "nohup setsid env -i sleep 1000 > /dev/null 2>&1 &")
    with contextlib.ExitStack() as kept:
        # Kept open: the kernel would give the number of one that is gone to a simulator of another test.
        files = [
            kept.enter_context(Path(f"/proc/{p.pid}/ns/net").open("rb")) for p in processes.belonging(home)
        ]
        spaces = {Path(f"/proc/self/fd/{file.fileno()}").readlink() for file in files}
        os.kill(sim.pid, signal.SIGKILL)
        assert control.stop(home) > 0
        assert processes.belonging(home) == []
        assert len(spaces) > 2
        assert spaces.isdisjoint(_networks())
    assert str(home) not in Path("/proc/mounts").read_text()
    assert list((home / "sim" / "nodes").iterdir()) == []


def _networks() -> set[Path]:
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                found.add((entry / "ns" / "net").readlink())
    return found


def test_a_taken_port_and_a_missing_program_are_named(home: Path, tmp_path: Path) -> None:
    from cloudddp.errors import CloudDDPError

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CloudDDPError, match=f"{taken.getsockname()[1]}"),
    ):
        control.start(home, nodes="namespace", port=taken.getsockname()[1])


def test_the_command_line_enters_the_lab_by_itself(lab: control.Simulator, tmp_path: Path) -> None:
    environment = {**os.environ, "CLOUDDDP_HOME": str(lab.home)}
    done = subprocess.run(
        [sys.executable, "-m", "cloudddp", "sim", "exec", "--", "ip", "-o", "-4", "addr", "show"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "203.0.113.10/32" in done.stdout
    code = "import urllib.request, os; print(urllib.request.urlopen(os.environ['CLOUDDDP_CHECKIP_URL']).read().decode())"
    done = subprocess.run(
        [sys.executable, "-m", "cloudddp", "sim", "exec", "--", sys.executable, "-c", code],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "203.0.113.10"


def test_threads_of_the_test_itself_are_back_outside(lab: control.Simulator) -> None:
    before = Path("/proc/thread-self/ns/net").readlink()
    with inside(lab):
        seen: list[Path] = []
        thread = threading.Thread(target=lambda: seen.append(Path("/proc/thread-self/ns/net").readlink()))
        thread.start()
        thread.join()
        assert seen != [before]
    assert Path("/proc/thread-self/ns/net").readlink() == before
