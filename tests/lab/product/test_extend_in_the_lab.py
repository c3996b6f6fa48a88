"""`extend` on nodes with timers of their own: they end at the new deadline and not at the old one, also after
a reboot in between."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from support.harness import CommandLine, instances_of, until

from cloudddp.simulator import control
from cloudddp.tags import iso


def after(seconds: float) -> datetime:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).replace(microsecond=0)


def test_nodes_end_at_the_new_deadline(lab: control.Simulator, lab_cli: CommandLine, ec2: Any) -> None:
    lab_cli.env["CLOUDDDP_TIME_SCALE"] = "0.1"  # a deadline may be 6 seconds ahead
    lab_cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    nodes = json.loads(lab_cli.ok("status", "--json"))[0]["nodes"]
    ids = [node["instance_id"] for node in nodes]
    old = after(20)
    lab_cli.ok("extend", "--until", iso(old))
    new = after(50)
    lab_cli.ok("extend", "--until", iso(new))
    assert datetime.now(UTC) < old, "this computer is too slow for this test"
    shown = lab_cli.ok(
        "exec", "--", "systemctl show cloudddp-deadline.timer -p ActiveState,NextElapseUSecRealtime"
    )
    assert shown.count("ActiveState=active") == 2
    assert shown.count(f"{new:%Y-%m-%d %H:%M:%S} UTC") == 2
    check = lab_cli.ok("exec", "--", "cat /var/lib/cloud/scripts/per-boot/cloudddp-deadline")
    assert check.count(f" -lt {new.timestamp():.0f} ") == 2
    listed = [str(node["deadline"]) for node in control.nodes(lab) if node["instance_id"] in ids]
    assert listed == [iso(new), iso(new)]
    while datetime.now(UTC) < old + timedelta(seconds=2):
        time.sleep(0.1)
    ec2.reboot_instances(InstanceIds=ids[1:])  # the check of each boot has the new deadline, too
    while datetime.now(UTC) < new - timedelta(seconds=3):
        assert set(instances_of(ec2, lab_cli.cluster)) == set(ids)
        time.sleep(1)
    until(lambda: not instances_of(ec2, lab_cli.cluster), why="the nodes have ended")
    assert datetime.now(UTC) >= new
