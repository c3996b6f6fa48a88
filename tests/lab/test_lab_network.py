"""The lab's network: addresses, faults, isolation, and starting and stopping the lab."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, call, inside, reachable, serve, shell
from support.simlab import execute

from cloudddp.errors import UsageError
from cloudddp.sim import control
from cloudddp.sim.linux import processes


@pytest.fixture(scope="module")
def pair(shared_lab_laptop: LabLaptop) -> Iterator[tuple[Any, Any]]:
    """Two nodes of one group, each with a server on port 4000 that returns the caller's address."""
    nodes = shared_lab_laptop.launch(2)
    for node in nodes:
        serve(shared_lab_laptop.login(node))
    yield nodes[0], nodes[1]


# -- addresses -----------------------------------------------------------------------------------------------


def test_node_has_its_ec2_address_and_mac(shared_lab_laptop: LabLaptop, pair: Any) -> None:
    for node in pair:
        shown = shell(
            shared_lab_laptop.login(node),
            "ip -o -4 addr show dev ens5; cat /sys/class/net/ens5/{address,mtu}",
        )
        assert f"inet {node['PrivateIpAddress']}/20" in shown
        assert node["NetworkInterfaces"][0]["MacAddress"] in shown
        assert shown.endswith("9001")
        assert shell(shared_lab_laptop.login(node), "hostname") == node["PrivateDnsName"].partition(".")[0]


def test_nodes_connect_by_private_address_and_name(shared_lab_laptop: LabLaptop, pair: Any) -> None:
    first, second = pair
    until(lambda: call(shared_lab_laptop, first, second["PrivateIpAddress"]) == first["PrivateIpAddress"])
    name = second["PrivateDnsName"].partition(".")[0]
    until(lambda: call(shared_lab_laptop, first, name) == first["PrivateIpAddress"])


def test_laptop_reaches_public_addresses_only(lab: control.Simulator, pair: Any) -> None:
    node = pair[0]
    assert reachable(lab, node["PublicIpAddress"], 22)
    assert not reachable(lab, node["PrivateIpAddress"], 22)


def test_lab_has_no_route_out(shared_lab_laptop: LabLaptop, lab: control.Simulator, pair: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        for address in ("127.0.0.1", "203.0.113.10", "192.0.2.1", "198.51.100.254"):
            assert call(shared_lab_laptop, pair[0], address, port, seconds=0.5) == ""
    with inside(lab):
        routes = subprocess.run(["ip", "-o", "route"], capture_output=True, text=True, check=True).stdout
    assert "default" not in routes


def test_interface_names_are_used_in_turn(home: Path) -> None:
    sim = control.start(home, nodes="namespace", interfaces=("ens5", "enp71s0"))
    laptop = LabLaptop(sim, "key")
    names = [shell(laptop.login(node), "ls /sys/class/net") for node in laptop.launch(2)]
    assert sorted(name.replace("lo", "").strip() for name in names) == ["enp71s0", "ens5"]


# -- faults --------------------------------------------------------------------------------------------------


def test_cut_node_does_not_respond_but_runs(lab_laptop: LabLaptop) -> None:
    first, second = lab_laptop.launch(2)
    lab_laptop.login(second)  # wait for its sshd
    ssh = lab_laptop.login(first)
    beating = "nohup sh -c 'while true; do date +%s%N > beat; sleep 0.05; done' > /dev/null 2>&1 &"
    shell(ssh, f"{beating} until [ -s beat ]; do sleep 0.05; done")
    control.fault(lab_laptop.sim, "cut", [first["InstanceId"]])
    assert not reachable(lab_laptop.sim, first["PublicIpAddress"], 22)
    assert reachable(lab_laptop.sim, second["PublicIpAddress"], 22)
    assert lab_laptop.describe(first["InstanceId"])[0]["State"]["Name"] == "running"
    beat = (
        Path(
            next(n["home"] for n in control.nodes(lab_laptop.sim) if n["instance_id"] == first["InstanceId"])
        )
        / "beat"
    )
    before = beat.read_text()
    until(lambda: beat.read_text() not in ("", before))
    control.fault(lab_laptop.sim, "heal", [first["InstanceId"]])
    until(lambda: reachable(lab_laptop.sim, first["PublicIpAddress"], 22))


def test_cut_between_affects_two_nodes_only(lab_laptop: LabLaptop) -> None:
    a, b, c = lab_laptop.launch(3)
    for node in (a, b, c):
        lab_laptop.login(node)  # wait for each sshd
    control.fault(lab_laptop.sim, "cut-between", [a["InstanceId"], b["InstanceId"]])
    assert call(lab_laptop, a, b["PrivateIpAddress"], 22, seconds=1) == ""
    assert call(lab_laptop, b, a["PrivateIpAddress"], 22, seconds=1) == ""
    until(lambda: call(lab_laptop, a, c["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))
    control.fault(lab_laptop.sim, "heal", [a["InstanceId"]])
    until(lambda: call(lab_laptop, a, b["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))


def test_cut_from_drops_packets_in_one_direction(lab_laptop: LabLaptop) -> None:
    """Asymmetric routes and half-dead links exist: here a reply gets through, and what asks for it does
    not."""
    a, b = lab_laptop.launch(2)
    for node in (a, b):
        lab_laptop.login(node)  # wait for each sshd
    control.fault(lab_laptop.sim, "cut-from", [a["InstanceId"], b["InstanceId"]])
    sent = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('{}', 4242))"
    received = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 4242)); "
        "s.settimeout(3); print(s.recv(9).decode())"
    )
    for sender, receiver, arrives in ((a, b, True), (b, a, False)):
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(execute, lab_laptop.login(receiver), f'python3 -c "{received}"')
            while not waiting.done():
                execute(lab_laptop.login(sender), f'python3 -c "{sent.format(receiver["PrivateIpAddress"])}"')
        assert (waiting.result().out == b"x\n") is arrives
    control.fault(lab_laptop.sim, "heal", [a["InstanceId"]])
    until(lambda: call(lab_laptop, b, a["PrivateIpAddress"], 22).startswith("SSH-2.0-OpenSSH"))


def test_frozen_node_accepts_connections_without_response(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch(1)
    lab_laptop.login(node)
    control.fault(lab_laptop.sim, "freeze", [node["InstanceId"]])
    with (
        inside(lab_laptop.sim),
        socket.create_connection((node["PublicIpAddress"], 22), timeout=2) as connection,
    ):
        with pytest.raises(TimeoutError):
            connection.recv(10)
        control.fault(lab_laptop.sim, "heal", [node["InstanceId"]])
        connection.settimeout(20)
        assert connection.recv(4) == b"SSH-"


def test_killed_node_is_terminated(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch(1)
    ssh = lab_laptop.login(node)
    shell(ssh, "nohup setsid sleep 1000 > /dev/null 2>&1 &")
    control.fault(lab_laptop.sim, "kill", [node["InstanceId"]])
    shown = until(
        lambda: (i := lab_laptop.describe(node["InstanceId"])[0])["State"]["Name"] == "terminated" and i
    )
    assert shown["StateReason"]["Code"] == "Server.InternalError"
    assert node["InstanceId"] not in {p.node for p in processes.belonging(lab_laptop.sim.home)}


def test_fill_disk_until_healed(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch(1)
    ssh = lab_laptop.login(node)
    shell(ssh, "echo kept > before")
    control.fault(lab_laptop.sim, "fill-disk", [node["InstanceId"]])
    done = attempt(ssh, "head -c 100000 /dev/zero > more")
    assert done.status != 0
    assert b"No space left on device" in done.err
    control.fault(lab_laptop.sim, "heal", [node["InstanceId"]])
    assert shell(ssh, "head -c 100000 /dev/zero > more && cat before") == "kept"


def test_drop_ssh_affects_ssh_only(lab_laptop: LabLaptop) -> None:
    first, second = lab_laptop.launch(2)
    serve(lab_laptop.login(second))
    ssh = lab_laptop.login(first)
    control.fault(lab_laptop.sim, "drop-ssh", [second["InstanceId"]])
    assert not reachable(lab_laptop.sim, second["PublicIpAddress"], 22)
    code = f"import socket;print(socket.create_connection(('{second['PrivateIpAddress']}',4000),5).recv(99).decode())"  # noqa: E501
    assert shell(ssh, f'python3 -c "{code}"') == first["PrivateIpAddress"]


def test_slow_ssh_works(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch(1)
    ssh = lab_laptop.login(node)

    def seconds() -> float:
        began = time.monotonic()
        assert len(shell(ssh, "head -c 40000 /dev/zero | tr '\\0' x")) == 40000
        return time.monotonic() - began

    quick = min(seconds() for _ in range(3))
    control.fault(lab_laptop.sim, "slow-ssh", [node["InstanceId"]])
    assert seconds() > max(2.0, 5 * quick)  # limited to 4 kB/s: no machine is that slow by itself


@pytest.mark.parametrize(
    ("kind", "nodes", "message"),
    [
        ("explode", ["0"], "faults: kill, cut"),
        ("cut", ["i-0nowhere"], "nodes: "),
        ("cut-between", ["0"], "two nodes"),
    ],
)
def test_unknown_fault_or_node_is_rejected(
    lab: control.Simulator, pair: Any, kind: str, nodes: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        control.fault(lab, kind, nodes)


# -- the lab itself ------------------------------------------------------------------------------------------


def test_stop_after_the_server_was_killed(home: Path) -> None:
    sim = control.start(home, nodes="namespace")
    laptop = LabLaptop(sim, "key")
    for node in laptop.launch(2):
        shell(laptop.login(node), "nohup setsid env -i sleep 1000 > /dev/null 2>&1 &")
    with contextlib.ExitStack() as kept:
        # Kept open, or the kernel could reuse its number for a simulator of another test.
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


def test_port_in_use_and_missing_program_are_reported(home: Path, tmp_path: Path) -> None:
    from cloudddp.errors import CloudDDPError

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CloudDDPError, match=f"{taken.getsockname()[1]}"),
    ):
        control.start(home, nodes="namespace", port=taken.getsockname()[1])


def test_command_line_enters_the_lab(lab: control.Simulator, tmp_path: Path) -> None:
    environment = {**os.environ, "CLOUDDDP_HOME": str(lab.home)}
    done = subprocess.run(
        [sys.executable, "-m", "cloudddp", "sim", "exec", "--", "ip", "-o", "-4", "addr", "show"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "203.0.113.10/32" in done.stdout
    code = (
        "import urllib.request, os; "
        "print(urllib.request.urlopen(os.environ['CLOUDDDP_CHECKIP_URL']).read().decode())"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cloudddp", "sim", "exec", "--", sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "203.0.113.10"


def test_this_process_is_outside_the_lab(lab: control.Simulator) -> None:
    before = Path("/proc/thread-self/ns/net").readlink()
    with inside(lab):
        seen: list[Path] = []
        thread = threading.Thread(target=lambda: seen.append(Path("/proc/thread-self/ns/net").readlink()))
        thread.start()
        thread.join()
        assert seen != [before]
    assert Path("/proc/thread-self/ns/net").readlink() == before
