"""Which Python set-up and ranks get on an image laid out as the Deep Learning AMI; GPUs that fail later."""

from __future__ import annotations

import json

import pytest
from support.harness import CommandLine, wait_for
from support.simlab import client_of

from cloudddp.simulator import control

PACKAGE = """[project]
name = "hello"
version = "1"
[project.scripts]
hello = "hello:main"
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[tool.setuptools]
py-modules = ["hello"]
"""
TOML = """
[job]
rendezvous = "direct"
nproc_per_node = 1
[setup]
run = ["pip --version > ../setup", "command -v pip torchrun >> ../setup", "echo $VIRTUAL_ENV >> ../setup",
  "pip install --no-index --no-build-isolation -e ."]
"""
SHOW = """
import hello, os, resource, shutil, subprocess
hello.main()
subprocess.run(["hello"])
print(open(os.path.expanduser("~/setup")).read())
print("rank", shutil.which("torchrun"), os.environ["VIRTUAL_ENV"])
for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK): print("limits", *resource.getrlimit(kind))
"""


def test_set_up_and_ranks_use_the_environment_of_pytorch(lab_cli: CommandLine) -> None:
    """On the AMI, `pip` on PATH is the system's, which answers externally-managed-environment, and `torchrun`
    is missing (release notes of the DLAMI with PyTorch 2.9 to 2.12). Ranks find a project that the set-up
    installs, and may open as many files as the machine allows (systemd: DefaultLimitNOFILE=1024:524288)."""
    pytest.importorskip("torch")
    lab_cli.write("pyproject.toml", PACKAGE)
    lab_cli.write("hello.py", "def main(): print('hello of the program', flush=True)\n")
    lab_cli.write("cloudddp.toml", TOML)
    lab_cli.write("sub/show.py", SHOW)
    lab_cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    assert lab_cli.ok("exec", "ulimit -Sn") == "1024\n"
    lines = [line.partition("] ")[2] for line in lab_cli.ok("launch", "sub/show.py").splitlines()]
    assert lines.count("hello of the program") == 2
    assert {"/opt/pytorch/bin/pip", "/opt/pytorch/bin/torchrun", "/opt/pytorch"} <= set(lines)
    assert "rank /opt/pytorch/bin/torchrun /opt/pytorch" in lines
    limits = [line.split()[1:] for line in lines if line.startswith("limits ")]
    assert all(soft == hard for soft, hard in limits)
    assert int(limits[0][0]) > 1024


def test_defective_gpu_is_refused(lab_cli: CommandLine, lab: control.Simulator) -> None:
    """`nvidia-smi -L` exits with 15 if a GPU has fallen off the bus. That was taken for 0 GPUs, and one rank
    started on the CPU."""
    cli = lab_cli
    cli.write("ok.py", "print('not reached')")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    lost = json.loads(cli.ok("status", "--json"))[0]["nodes"][1]["instance_id"]
    control.conditions(lab, {"boot": {"failed_gpus": 1}})
    try:
        client_of(lab, "ec2").reboot_instances(InstanceIds=[lost])
        wait_for(
            lambda: "Unknown Error" in cli("exec", "nvidia-smi -L || true").stdout, "the node has rebooted"
        )
    finally:
        control.conditions(lab, {"boot": {"failed_gpus": None}})
    for words in (("launch", "ok.py"), ("up", "-n", "2", "-t", "g5.12xlarge")):
        done = cli.exits(1, *words, CLOUDDDP_TIME_SCALE="0.1")
        assert f"node 1 ({lost}) shows 3 of 4 GPUs (nvidia-smi -L)" in done.stderr
        assert "not reached" not in done.stdout
