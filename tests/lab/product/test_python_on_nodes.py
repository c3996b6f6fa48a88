"""Which Python set-up commands and ranks get on an image that is laid out as the Deep Learning AMI."""

from __future__ import annotations

import json

import pytest
from support.harness import CommandLine, wait_for
from support.simlab import client_of

from cloudddp.sim import control


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    pytest.importorskip("torch")
    return lab_cli


def test_set_up_and_ranks_use_the_environment_of_pytorch(cli: CommandLine) -> None:
    """On the AMI, `pip` on PATH is the system's, which answers externally-managed-environment, and `torchrun`
    is missing (release notes of the DLAMI with PyTorch 2.9 to 2.12)."""
    cli.write(
        "cloudddp.toml",
        '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n[setup]\n'
        'run = ["pip --version > ../setup", "command -v pip torchrun >> ../setup", "echo $VIRTUAL_ENV >> '
        '../setup"]\n',
    )
    cli.write(
        "show.py",
        "import os, shutil\nprint(open('../setup').read())\n"
        "print('rank', shutil.which('torchrun'), os.environ['VIRTUAL_ENV'])\n",
    )
    cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    output = cli.ok("launch", "show.py")
    for line in ("/opt/pytorch/bin/pip", "/opt/pytorch/bin/torchrun", "/opt/pytorch"):
        assert any(shown.endswith(f"] {line}") for shown in output.splitlines()), output
    assert "rank /opt/pytorch/bin/torchrun /opt/pytorch" in output


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


def test_installed_project_and_its_programs_are_found_by_ranks(cli: CommandLine) -> None:
    cli.write("pyproject.toml", PACKAGE)
    cli.write("hello.py", "def main(): print('hello of the program')\n")
    settings = '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n[setup]\n'
    cli.write("cloudddp.toml", settings + 'run = ["pip install --no-index --no-build-isolation -e ."]\n')
    cli.write("sub/show.py", "import hello, subprocess\nhello.main()\nsubprocess.run(['hello'])\n")
    cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    assert cli.ok("launch", "sub/show.py").count("hello of the program") == 2


def test_set_up_installs_into_the_environment_that_it_creates(cli: CommandLine) -> None:
    cli.write(
        "cloudddp.toml",
        '[job]\npython = ".venv/bin/python"\nrendezvous = "direct"\nnproc_per_node = 1\n[setup]\n'
        'run = ["python3 -m venv .venv", "command -v pip", "pip --version"]\n',
    )
    cli.write(
        "show.py", "import sys\nprint(sys.prefix)\ntry: import moto\nexcept ImportError: print('separate')\n"
    )
    cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    done = cli("launch", "show.py")
    assert done.returncode == 0, done.stderr
    assert "/project/.venv/bin/pip\n" in done.stderr
    assert "from /home/ubuntu/project/.venv/lib/" in done.stderr
    assert "/project/.venv\n" in done.stdout
    assert "separate" in done.stdout


def test_set_up_that_may_not_change_the_environment_says_how_to(cli: CommandLine) -> None:
    """Whether /opt/pytorch belongs to the login user is not documented. The one of the lab does; this one was
    made by root."""
    cli.write(
        "cloudddp.toml",
        '[job]\npython = "/srv/env/bin/python"\n[setup]\nrun = ["cd $VIRTUAL_ENV/lib/python3*/site-packages '
        '&& touch new"]\n',
    )
    cli.write("ok.py", "print('not reached')")
    cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    cli.ok("exec", "sudo python3 -m venv --without-pip /srv/env")
    done = cli("launch", "ok.py")
    assert done.returncode == 1
    assert (
        'the login user may not write to /srv/env: put "sudo chown -R $USER /srv/env" first in [setup] run'
        in done.stderr
    )


def test_defective_gpu_is_refused(cli: CommandLine, lab: control.Simulator) -> None:
    """`nvidia-smi -L` exits with 15 if a GPU has fallen off the bus. That was taken for 0 GPUs, and one rank
    started on the CPU."""
    cli.write("ok.py", "print('not reached')")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    lost = json.loads(cli.ok("status", "--json"))[0]["nodes"][1]["instance_id"]
    cli.ok("sim", "conditions", '{"boot": {"failed_gpus": 1}}')
    try:
        client_of(lab, "ec2").reboot_instances(InstanceIds=[lost])
        wait_for(
            lambda: "Unknown Error" in cli("exec", "nvidia-smi -L || true").stdout, "the node has rebooted"
        )
    finally:
        cli.ok("sim", "conditions", '{"boot": {"failed_gpus": null}}')
    for words in (("launch", "ok.py"), ("up", "-n", "2", "-t", "g5.12xlarge")):
        done = cli(*words, CLOUDDDP_TIME_SCALE="0.1")
        assert done.returncode == 1, words
        assert f"node 1 ({lost}) shows 3 of 4 GPUs (nvidia-smi -L)" in done.stderr
        assert "not reached" not in done.stdout


def test_gpu_that_only_cuda_finds_defective_is_refused(cli: CommandLine) -> None:
    """nvidia-smi and NVML list the GPUs of a machine whose fabric manager is down; their first use fails
    (error 802)."""
    cli.ok("sim", "conditions", '{"boot": {"unusable_gpus": 1}}')
    try:
        done = cli("up", "-n", "1", "-t", "g5.12xlarge", CLOUDDDP_TIME_SCALE="0.1")
    finally:
        cli.ok("sim", "conditions", '{"boot": {"unusable_gpus": null}}')
    assert done.returncode == 1
    assert "has 3 of 4 GPUs that PyTorch can use: GPU 3: CUDA error" in done.stderr
    assert json.loads(cli("status", "--json").stdout) == []


def test_ranks_may_open_as_many_files_as_the_machine_allows(cli: CommandLine) -> None:
    """systemd: DefaultLimitNOFILE=1024:524288."""
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    cli.write(
        "limits.py",
        "import resource as r\nfor kind in (r.RLIMIT_NOFILE, r.RLIMIT_MEMLOCK): print(*r.getrlimit(kind))\n",
    )
    cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    assert "] 1024\n" in cli.ok("exec", "ulimit -Sn")
    shown = [line.partition("] ")[2].split() for line in cli.ok("launch", "limits.py").splitlines()]
    limits = [pair for pair in shown if len(pair) == 2 and pair[0].lstrip("-").isdigit()]
    assert len(limits) == 2
    assert all(soft == hard for soft, hard in limits)
    assert int(limits[0][0]) > 1024
