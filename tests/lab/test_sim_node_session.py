"""`cloudddp sim session`: a connection to a node without a route to it, as a session of AWS Systems
Manager."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.harness import until
from support.labnode import LabLaptop, inside, reachable
from support.simlab import Laptop
from support.vpcs import Vpc

from cloudddp.simulator import control


def session(sim: control.Simulator, target: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "CLOUDDDP_HOME": str(sim.home)}
    argv = [sys.executable, "-m", "cloudddp", "sim", "session", "--target", target]
    return subprocess.run(argv, input=data, env=environment, capture_output=True, timeout=300, check=False)


def test_ssh_server_answers_without_route_and_rule(lab_laptop: LabLaptop) -> None:
    vpc = Vpc(lab_laptop.ec2, "10.46.0.0/16")
    shut = lab_laptop.ec2.create_security_group(GroupName="shut", Description="d", VpcId=vpc.id)["GroupId"]
    interface = {
        "DeviceIndex": 0,
        "SubnetId": vpc.private,
        "Groups": [shut],
        "AssociatePublicIpAddress": False,
    }
    (node,) = lab_laptop.launch(1, NetworkInterfaces=[interface])
    assert not reachable(lab_laptop.sim, node["PrivateIpAddress"], 22)
    until(
        lambda: session(lab_laptop.sim, node["InstanceId"], b"SSH-2.0-test\r\n").stdout.startswith(
            b"SSH-2.0-OpenSSH"
        )
    )
    with inside(lab_laptop.sim):  # a proxy command of `cloudddp --sim` is started inside the lab
        assert session(lab_laptop.sim, node["InstanceId"], b"x\n").stdout.startswith(b"SSH-2.0-OpenSSH")


def test_end_by_ssh_is_no_interrupt(laptop: Laptop) -> None:
    """ssh sends SIGHUP to its proxy command when the connection has ended (OpenSSH, sshconnect.c:
    ssh_kill_proxy_command)."""
    (node,) = laptop.launch()
    environment = {**os.environ, "CLOUDDDP_HOME": str(laptop.sim.home)}
    argv = [sys.executable, "-m", "cloudddp", "sim", "session", "--target", node["InstanceId"]]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGHUP, signal.SIGINT)],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"SSH-"
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, b"")


def test_unknown_target_is_refused_as_by_aws(sim: control.Simulator) -> None:
    done = session(sim, "i-0123456789abcdef0")
    assert done.returncode == 1
    refusal = (
        "(TargetNotConnected) when calling the StartSession operation: i-0123456789abcdef0 is not connected"
    )
    assert refusal in done.stderr.decode()
