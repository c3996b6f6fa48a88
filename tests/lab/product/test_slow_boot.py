"""`up` on nodes that boot slowly, in the lab, with the command line's clock scaled."""

from __future__ import annotations

import json

import pytest
from support.harness import TIMEOUT, CommandLine, finished

SCALE = 0.04
TWENTY_MINUTES = 20 * 60 * SCALE
BOOT = ("ssh_seconds", "nologin_seconds", "final_seconds", "apt_lock_seconds", "first_import_seconds")


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    return lab_cli


def boot(cli: CommandLine, **condition: float | None) -> None:
    cli.ok("sim", "conditions", json.dumps({"boot": condition}))


def test_addresses_that_may_connect_are_named_while_no_node_answers(cli: CommandLine) -> None:
    """SSH can leave by another address than the HTTPS request that asked for it: split VPNs, pools of NAT
    addresses."""
    err = cli.fails(
        1,
        "up",
        "-n",
        "2",
        "--ssh-from",
        "192.0.2.7/32",
        CLOUDDDP_TIME_SCALE=str(SCALE),
        CLOUDDDP_READY_MINUTES="2",
    )
    (line,) = [one for one in err.splitlines() if "no answer from node" in one and "SSH is open" in one]
    assert "SSH is open to 192.0.2.7/32" in line
    assert "allow-me" in line
    assert "--ssh-from" in line


def test_cluster_that_boots_for_twenty_minutes(cli: CommandLine) -> None:
    """AWS's metal instances can take over 20 minutes to boot (canonical/pycloudlib, PR 192). sshd answers
    before logins are allowed, cloud-init finishes later, apt's lock is held, and the first import of torch
    reads a cold disk."""
    boot(
        cli,
        ssh_seconds=TWENTY_MINUTES,
        nologin_seconds=3,
        final_seconds=5,
        apt_lock_seconds=20,
        first_import_seconds=3,
    )
    cli.write(
        "cloudddp.toml",
        '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n[setup]\nrun = ["sudo apt-get -f -y install"]\n',
    )
    cli.write("works.py", "print('trained')\n")
    try:
        # In the background: the harness ends a command after two minutes.
        started = cli.start("up", "-n", "2", "-t", "g4dn.metal", CLOUDDDP_TIME_SCALE=str(SCALE))
        out, _ = finished(started, 0, 10 * TIMEOUT)
        assert "is ready" in out
        assert cli.ok("launch", "works.py").count("trained") == 2
    finally:
        boot(cli, **dict.fromkeys(BOOT))
