"""`up`, `launch`, `pull` and `down` on nodes with a real systemd, cloud-init and OpenSSH; and a comparison of
the simulator's stand-ins for them with the real programs."""

from __future__ import annotations

import contextlib
import ensurepip
import hashlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.harness import (
    CommandLine,
    clean_environment,
    instances_of,
    listed_nodes,
    remaining,
    running_instances,
    until,
)
from support.labnode import LabLaptop, attempt, boot_id, inside, shell
from support.local_packages import wheel
from support.simlab import client_of
from support.userdata import HUNG, of_instance, product_user_data
from support.witnesslab import Lab

from cloudddp.errors import CloudDDPError
from cloudddp.simulator import control
from cloudddp.simulator.ec2.images import IMAGES

pytestmark = pytest.mark.timeout(900, func_only=True)  # the first one may make the operating system

TYPE = ("-t", "c5.xlarge", "--price", "0.2", "--allow-cpu")
TRAIN = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
os.makedirs("runs", exist_ok=True)
with open(f"runs/{dist.get_rank()}", "w") as file:
    file.write(f"{total.item()} {dist.get_world_size()}")
dist.destroy_process_group()
"""

# What a node looks like at one moment of its boot, appended to a file.
LOOK = """\
{ echo "== $1"; whoami; pwd; umask
  for unit in ssh.service cloudddp-deadline.timer cloudddp-idle.timer; do
    echo "$unit $(systemctl is-active $unit) $(systemctl is-enabled $unit 2> /dev/null)"; done
  for path in /home/ubuntu/.ssh/authorized_keys /etc/ssh/ssh_host_ed25519_key /etc/cloudddp/idle.sh \\
      /var/lib/cloud/scripts/per-boot/cloudddp-deadline /var/lib/cloud/instance/boot-finished; do
    [ ! -e $path ] || echo "exists $path"; done; } >> /var/lib/order.txt
"""
# One JSON object: files of the user data, units, and what the login user may do.
EXAMINE = """\
import glob, grp, hashlib, json, os, pwd, subprocess
def run(*words):
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()
def look(path):
    found = os.stat(path)
    data = open(path, "rb").read()
    return [oct(found.st_mode), pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid).gr_name,
            hashlib.sha256(data).hexdigest()]
paths = json.loads(os.environ["PATHS"])
units = [f"cloudddp-{name}.{kind}" for name in ("deadline", "idle") for kind in ("timer", "service")]
show = ["LoadState", "ActiveState", "SubState", "UnitFileState"]
print(json.dumps({
    "files": {path: look(path) if os.path.exists(path) else None for path in paths},
    "host keys": sorted(glob.glob("/etc/ssh/ssh_host_*")),
    "units": {u: dict(l.split("=", 1) for l in run("systemctl", "show", u, "-p", ",".join(show)).splitlines())
              for u in units},
    "timers": sorted(line.split()[-2] for line in run("systemctl", "list-timers", "--no-legend").splitlines()
                     if "cloudddp" in line),
    "order": open("/var/lib/order.txt").read().split("== "),
    "status": run("cloud-init", "status").split()[-1],
}))
"""
METADATA = (
    "base=http://169.254.169.254/latest; "
    "token=$(curl -sX PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $base/api/token) && "
    'curl -sH "X-aws-ec2-metadata-token: $token" $base/meta-data/{path}'
)
BASE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
EXAMINED = (
    *("/etc/systemd/system/cloudddp-deadline.timer", "/etc/systemd/system/cloudddp-deadline.service"),
    *("/etc/systemd/system/cloudddp-idle.timer", "/etc/systemd/system/cloudddp-idle.service"),
    *("/etc/cloudddp/idle.sh", "/etc/apt/apt.conf.d/99cloudddp"),
    *("/var/lib/cloud/scripts/per-boot/cloudddp-deadline", "/home/ubuntu/.ssh/authorized_keys"),
    *("/etc/ssh/ssh_host_ed25519_key", "/etc/ssh/ssh_host_ed25519_key.pub", "/var/tmp/mine"),
)


@pytest.fixture
def cli(machines: control.Simulator, project: Path, request: pytest.FixtureRequest) -> Iterator[CommandLine]:
    cluster = f"m{int(hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:8], 16)}"
    env = clean_environment(
        CLOUDDDP_HOME=str(machines.home), CLOUDDDP_CLUSTER=cluster, CLOUDDDP_YES="1", CLOUDDDP_SIM="1"
    )
    line = CommandLine(project, cluster, env)
    yield line
    line.end()
    control.conditions(machines, {"clear": True})
    assert line.remove(client_of(machines, "ec2")) == 0


@contextmanager
def boot_condition(machines: control.Simulator, **settings: float) -> Iterator[None]:
    control.conditions(machines, {"boot": settings})
    try:
        yield
    finally:
        control.conditions(machines, {"boot": dict.fromkeys(settings)})


def test_stand_ins_do_what_systemd_and_cloud_init_do(machines: control.Simulator, lab: Lab) -> None:
    """The same user data on both kinds of nodes: files, owners, modes, keys, units, timers, and order."""
    found = [examined(LabLaptop(sim, "compared")) for sim in (lab.sim, machines)]
    stand_in, real = found
    for name in real:
        print(f"{name}: {'equal' if stand_in[name] == real[name] else 'different'}: {json.dumps(real[name])}")
    assert real["status"] == "done"
    assert all(real["files"].values())
    assert stand_in == real


def examined(laptop: LabLaptop) -> dict[str, Any]:
    expires = datetime(2099, 1, 1, tzinfo=UTC)
    data = product_user_data(
        laptop,
        created=expires - timedelta(hours=1),
        expires=expires,
        idle_minutes=30,
        more={
            "bootcmd": [["sh", "-c", LOOK, "look", "bootcmd"], "echo $INSTANCE_ID > /var/tmp/instance"],
            "write_files": [
                {"path": "/var/tmp/mine", "content": "aGVsbG8=", "encoding": "b64", "owner": "root:root",
                 "permissions": "0640"},
                {"path": "/var/lib/cloud/scripts/per-boot/zz-look", "permissions": "0755",
                 "content": f"#!/bin/sh\nset -- per-boot\n{LOOK}"},
            ],
            "runcmd": [["sh", "-c", LOOK, "look", "runcmd"]],
        },
    )  # fmt: skip
    try:
        (node,) = laptop.launch(UserData=data, InstanceType="c5.large")
        client = laptop.login(node)
        shell(client, "cloud-init status --wait > /dev/null")
        command = f"sudo env PATHS='{json.dumps(EXAMINED)}' python3 -c '{EXAMINE}'"
        answer: dict[str, Any] = json.loads(shell(client, command))
        assert shell(client, "cat /var/tmp/instance") == node["InstanceId"]
        for path in answer["files"]:
            if "ssh" in path and answer["files"][path]:
                answer["files"][path].pop()  # each laptop has keys of its own
        return answer
    finally:
        laptop.leave()


def test_training_on_two_machines_from_up_to_down(cli: CommandLine, machines: control.Simulator) -> None:
    cli.write("train.py", TRAIN)
    cli.ok("up", "-n", "2", *TYPE)
    assert [node["state"] for node in listed_nodes(cli)] == ["running", "running"]
    cli.ok("launch", "--nproc-per-node", "2", "train.py")
    cli.ok("pull", "--all-nodes")
    (results,) = cli.cwd.glob("results/*")
    for folder in (results, results / "node1"):
        assert [path.read_text() for path in (folder / "runs").iterdir()] == ["6.0 4"] * 2
    cli.ok("down", "-y")
    assert remaining(client_of(machines, "ec2"), cli.cluster).nothing


@pytest.mark.parametrize("by", ["ssh.service", "ssh.socket"])
def test_only_host_keys_of_the_cluster_are_ever_presented(
    cli: CommandLine, machines: control.Simulator, by: str
) -> None:
    """Also while /run/nologin refuses logins, which PAM reads."""
    with pytest.raises(
        CloudDDPError, match="ssh_seconds has no effect on machine nodes; these have nologin_seconds"
    ):
        control.conditions(machines, {"boot": {"ssh_seconds": 5}})
    settings = {"ssh_socket": int(by == "ssh.socket"), "nologin_seconds": 6}
    with boot_condition(machines, **settings), presented_keys(machines, cli.cluster) as presented:
        cli.ok("up", "-n", "1", *TYPE)
        sockets = cli.ok("exec", "--", "systemctl is-active ssh.socket || :")
        assert ("inactive" not in sockets) == (by == "ssh.socket")
        # What a reload makes of a sshd that a socket started: it ends, and systemd may wait 90 s for it.
        journal = cli.ok("exec", "--", "sudo journalctl -u ssh --no-pager")
        assert "Cannot bind" not in journal
        assert "Access denied for user ubuntu by PAM account configuration" in journal
        own = public_key(cli.ok("exec", "--", "cat /etc/ssh/ssh_host_*.pub"))
        until(lambda: own in presented)
    (instance,) = instances_of(client_of(machines, "ec2"), cli.cluster)
    given = json.loads(of_instance(machines, instance).partition(b"\n")[2])
    first = public_key(given["ssh_keys"]["ed25519_public"])
    assert presented <= {first, own}
    assert first != own


PLAN = '{"job": "j", "seconds": 5.0}'
USES = {  # what each node does, and whether that keeps it
    "sudo cp /bin/sleep /bin/ssm-session-worker && sudo systemd-run /bin/ssm-session-worker 600": True,
    "echo connected": True,
    "echo unused": False,
    f"mkdir ~/.cloudddp && echo '{PLAN}' > ~/.cloudddp/poweroff.json": False,
    "sudo systemctl reboot": False,
}


def test_node_ends_once_it_is_unused(machines: control.Simulator) -> None:
    """The kernel cuts the name of the process of Session Manager, ssm-session-worker, to 15 characters."""
    laptop = LabLaptop(machines, "idle")
    minutes, nodes = 0.25, {}
    try:
        for use in USES:
            idle = 0.0 if PLAN in use else minutes
            expires = datetime.now(UTC) + timedelta(hours=1)
            data = product_user_data(laptop, expires=expires, idle_minutes=idle)
            (nodes[use],) = laptop.launch(
                UserData=data, InstanceType="c5.large", InstanceInitiatedShutdownBehavior="terminate"
            )
        with ExitStack() as connections:
            for use, node in nodes.items():
                client = laptop.login(node)
                connections.callback(client.close)
                client.get_transport().set_keepalive(5)
                shell(client, "cloud-init status --wait > /dev/null")
                with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # of the reboot
                    attempt(client, use)
                if "connected" not in use:
                    client.close()
            for use, node in nodes.items():
                if not USES[use]:
                    until(lambda node=node: laptop.state(node["InstanceId"]) == "terminated")
            time.sleep(minutes * 60)
            kept = {use for use, node in nodes.items() if laptop.state(node["InstanceId"]) == "running"}
        assert kept == {use for use, keeps in USES.items() if keeps}
    finally:
        laptop.leave()


def test_ec2_reboots_a_machine_and_ends_one_that_does_not_power_off(machines: control.Simulator) -> None:
    laptop = LabLaptop(machines, "ended")
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "name", "Value": "shown"}]}]
    try:
        (early,) = laptop.run(InstanceType="c5.large")  # before its systemd receives signals
        laptop.terminate(early["InstanceId"])
        (node,) = laptop.launch(
            UserData=product_user_data(laptop, expires=datetime.now(UTC) + timedelta(hours=1)),
            InstanceType="c5.large",
            TagSpecifications=tags,
            MetadataOptions={"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
        )
        client = laptop.login(node)
        assert shell(client, METADATA.format(path="tags/instance/name")) == "shown"
        assert shell(client, METADATA.format(path="instance-id")) == node["InstanceId"]
        shell(client, "cloud-init status --wait > /dev/null")
        shell(client, "sudo sh -c 'timeout 1 yes > /dev/console || :'")  # 100 MB, and nobody reads them
        # With --suppress-sync, fsync does nothing: it succeeds even for a descriptor that is not open.
        shell(client, "python3 -c 'import os; os.fsync(987)'")
        before = boot_id(laptop, node)
        laptop.ec2.reboot_instances(InstanceIds=[node["InstanceId"]])
        until(lambda: boot_id(laptop, node) not in ("", before))
        client = laptop.login(node)  # with the host key that it had
        shell(
            client, f"echo '{HUNG}' | sudo tee /etc/systemd/system/hung.service && sudo systemctl start hung"
        )
        client.close()
        laptop.terminate(node["InstanceId"])
    finally:
        laptop.leave()
    log = (machines.home / "sim" / "server.log").read_text()
    assert f"{node['InstanceId']} did not power off in 30 s: killed" in log
    assert f"{early['InstanceId']} did not power off" not in log


def test_amazon_linux_layout(cli: CommandLine, machines: control.Simulator) -> None:
    """The user ec2-user, no group sudo, and Python 3.9 as python3, with which the agent runs."""
    image = next(i for i in IMAGES if "Amazon Linux" in i.name and i.architecture == "x86_64")
    cli.write("train.py", f"import time\n{TRAIN}\ntime.sleep(600)")
    cli.ok("up", "-n", "1", "--image", image.image_id, *TYPE)

    def ask(command: str) -> str:
        return cli.ok("exec", "--", command).strip()

    assert ask("whoami") == "ec2-user"
    assert ask("getent group sudo || echo none") == "none"
    assert "wheel" in ask("groups").split()
    assert ask("sudo -n id -u") == "0"
    assert ask("python3 --version").startswith("Python 3.9.")
    cli.ok("launch", "-d", "--nproc-per-node", "2", "train.py")
    until(lambda: ask("cat runs/1 2> /dev/null || :") == "1.0 2")
    assert ask("readlink /proc/$(pgrep -x cloudddp-job | head -n 1)/exe") == "/usr/bin/python3.9"
    cli.ok("cancel")
    cli.ok("down", "-y")


def public_key(text: str) -> str:
    """Return the key in a line that has one, without what is before and after it."""
    words = text.split()
    start = words.index("ssh-ed25519")
    return " ".join(words[start : start + 2])


@contextmanager
def presented_keys(machines: control.Simulator, cluster: str) -> Iterator[set[str]]:
    """Collect every host key that the cluster's node presents.

    Until its first answer it is asked all the time, then each 4 s: a sshd that is asked more often refuses
    this address (PerSourcePenalties), and `up` has the same one.
    """
    found: set[str] = set()
    stop = threading.Event()
    ec2 = client_of(machines, "ec2")

    def collect() -> None:
        while not stop.wait(4.0 if found else 0.1):
            for instance in running_instances(ec2, cluster):
                with inside(machines):
                    scan = ["ssh-keyscan", "-T", "2", "-t", "ed25519,ecdsa,rsa", instance["PublicIpAddress"]]
                    done = subprocess.run(scan, capture_output=True, text=True, check=False)
                found.update(" ".join(line.split()[1:3]) for line in done.stdout.splitlines())

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


TORCHRUN = """\
import os, sys
def main():
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    words = sys.argv[sys.argv.index("--no-python") + 1 :]
    os.execvp(words[0], words)
"""


def test_image_without_torch_and_pip_gets_them_from_requirements(cli: CommandLine) -> None:
    """As docs/aws.md says. A command of [setup] with pip or venv fails, with that hint. The
    package torch is a stand-in: the nodes reach no package index."""
    (pip,) = Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")
    wheel(cli.cwd / "wheels", "torch", "", **{"distributed/__init__": "", "distributed/run": TORCHRUN})
    shutil.copy(pip, cli.cwd / "wheels")
    cli.write("requirements.txt", "torch\n")
    cli.write("show.py", "import torch, sys; print('torch of', sys.prefix)")
    cli.ok("up", "-n", "1", *TYPE, "--image", BASE)
    assert cli.ok("exec", "ls -d /opt/pytorch || echo none").endswith("none\n")
    for command in ("pip install torch", "python3 -m pip install torch", "python3 -m venv .venv"):
        cli.write("cloudddp.toml", f'[setup]\nrun = ["{command}"]\n')
        failed = cli.fails(1, "launch", "show.py")
        assert 'list the packages in requirements.txt: [setup] environment = "requirements.txt"' in failed
    cli.write("cloudddp.toml", '[setup]\nenvironment = "requirements.txt"\nwheels = "wheels"\n')
    assert "] torch of /usr\n" in cli.ok("launch", "show.py")
