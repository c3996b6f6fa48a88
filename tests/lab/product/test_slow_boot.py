"""`up` on nodes that boot slowly, in the lab, with the command line's clock scaled."""

from __future__ import annotations

import json

import pytest
from support.harness import TIMEOUT, CommandLine, remaining
from support.simlab import client_of

from cloudddp.sim import control

SCALE = 0.04
TWENTY_MINUTES = 20 * 60 * SCALE
BOOT = ("ssh_seconds", "nologin_seconds", "final_seconds", "apt_lock_seconds", "first_import_seconds")


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    return lab_cli


def boot(cli: CommandLine, **condition: float) -> None:
    cli.ok("sim", "conditions", json.dumps({"boot": condition}))


def test_addresses_that_may_connect_are_named_while_no_node_answers(cli: CommandLine) -> None:
    """SSH can leave by another address than the HTTPS request that asked for it: split VPNs, pools of NAT
    addresses."""
    done = cli(
        "up",
        "-n",
        "2",
        "--ssh-from",
        "192.0.2.7/32",
        CLOUDDDP_TIME_SCALE=str(SCALE),
        CLOUDDDP_READY_MINUTES="2",
    )
    assert done.returncode == 1
    (line,) = [
        one for one in done.stderr.splitlines() if "no answer from node" in one and "SSH is open" in one
    ]
    assert "SSH is open to 192.0.2.7/32" in line
    assert "allow-me" in line
    assert "--ssh-from" in line


@pytest.mark.torch
def test_cluster_that_boots_for_twenty_minutes(cli: CommandLine, lab: control.Simulator) -> None:
    """AWS's metal instances can take over 20 minutes to boot (canonical/pycloudlib, PR 192). sshd answers
    before logins are allowed, cloud-init finishes later, apt's lock is held, and the first import of torch
    reads a cold disk."""
    pytest.importorskip("torch")
    boot(
        cli,
        ssh_seconds=TWENTY_MINUTES,
        nologin_seconds=3,
        final_seconds=5,
        apt_lock_seconds=20,
        first_import_seconds=3,
    )
    cli.write("cloudddp.toml", '[setup]\nrun = ["sudo apt-get -f -y install", "pip --version"]\n')
    cli.write(
        "reduce.py",
        "import os, pathlib, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * dist.get_rank()\n"
        "dist.all_reduce(x)\n"
        "print('sum', int(x), flush=True)\n"
        "pathlib.Path('runs').mkdir(exist_ok=True)\n"
        "pathlib.Path(f'runs/{dist.get_rank()}').write_text('done')\n"
        "dist.barrier()\n"
        "os._exit(0)\n",  # gloo's threads sometimes abort the interpreter's shutdown
    )
    try:
        # In the background: the harness ends a command after two minutes.
        started = cli.start("up", "-n", "2", "-t", "g4dn.metal", CLOUDDDP_TIME_SCALE=str(SCALE))
        out, err = started.communicate(timeout=10 * TIMEOUT)
        assert started.returncode == 0, err
        assert "is ready" in out
        assert cli.ok("launch", "--nproc-per-node", "2", "reduce.py").count("sum 6") == 4
        cli.ok("pull", "--all-nodes")
        pulled = [
            path.name
            for path in (cli.cwd / "results").rglob("*")
            if path.is_file() and "logs" not in path.parts
        ]
        assert sorted(pulled) == ["0", "1", "2", "3"]
        cli.ok("down", "-y")
        assert remaining(client_of(lab, "ec2"), cli.cluster).nothing
    finally:
        cli.ok("sim", "conditions", json.dumps({"boot": dict.fromkeys(BOOT)}))
