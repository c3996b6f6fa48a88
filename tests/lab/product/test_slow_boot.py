"""`up` on nodes that boot slowly, in the lab, with the command line's clock scaled."""

from __future__ import annotations

import json

import pytest
from support.harness import CommandLine

SCALE = 0.04
TWENTY_MINUTES = str(20 * 60 * SCALE)


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    return lab_cli


def boot(cli: CommandLine, **condition: float) -> None:
    cli.ok("sim", "conditions", json.dumps({"boot": condition}))


def test_addresses_that_may_connect_are_named_while_no_node_answers(cli: CommandLine) -> None:
    """SSH can leave by another address than the HTTPS request that asked for it: split VPNs, pools of NAT addresses."""
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
