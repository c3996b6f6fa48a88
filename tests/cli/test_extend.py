"""`extend`: tags, record and the timer of each node; a partial extension, and its repair."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from support.harness import lines_until, listed_nodes
from support.jobs import nodes_of

from cloudddp.local_state import ClusterFolder
from cloudddp.tags import iso


def state_of(cli: Any) -> dict[str, Any]:
    (found,) = json.loads(cli.ok("status", "--json"))
    return dict(found)


def ends(cli: Any) -> datetime:
    return datetime.fromisoformat(state_of(cli)["expires"])


def timers(cli: Any) -> set[str]:
    """Return the deadlines that the nodes themselves have."""
    return {str(node["deadline"]) for node in nodes_of(cli)}


def test_extend_moves_tags_record_and_timers_and_completes_a_partial_extension(
    simulator: Any, cli: Any, ec2: Any
) -> None:
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", "--max-hours", "1")
    state = state_of(cli)
    before, cluster_id = datetime.fromisoformat(state["expires"]), state["cluster_id"]
    done = cli.exits(0, "extend", "--hours", "2")
    after = before + timedelta(hours=2)
    assert ends(cli) == after
    assert f"{before:%Y-%m-%d %H:%M} UTC -> {after:%Y-%m-%d %H:%M} UTC, 2 h 00 min later" in done.stderr
    assert re.search(r"at most \$34\.[34]\d in all", done.stderr)
    assert f"the deadline is now {after:%Y-%m-%d %H:%M} UTC" in done.stdout
    assert timers(cli) == {iso(after)}
    record = json.loads((Path(simulator.home) / "clusters" / cluster_id / "cluster.json").read_text())
    assert record["expires"] == iso(after)
    tags = ec2.describe_tags()["Tags"]
    own = {one["ResourceId"] for one in tags if one["Value"] == cluster_id}
    moved = {one["ResourceId"] for one in tags if one["Value"] == iso(after)}
    assert moved == {one for one in own if one.startswith("i-")}
    earlier = (datetime.now(UTC) + timedelta(minutes=30)).replace(microsecond=0)
    cli.ok("extend", "--until", earlier.isoformat())
    assert (ends(cli), timers(cli)) == (earlier, {iso(earlier)})

    # a partial extension, and its repair
    silent = next(node["instance_id"] for node in listed_nodes(cli) if node["node"] == 1)
    ec2.stop_instances(InstanceIds=[silent])
    err = cli.fails(1, "extend", "--hours", "2")
    after = earlier + timedelta(hours=2)
    previous = f"{earlier:%Y-%m-%d %H:%M} UTC"
    assert f"not confirmed by node 1, which may still have the previous one, {previous}" in err
    assert f"cloudddp extend --until {iso(after)}" in err
    warned = cli("status").stderr
    assert f"node 1 ({silent}) ends at {earlier:%Y-%m-%d %H:%M:%S} UTC" in warned
    ec2.start_instances(InstanceIds=[silent])
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    cli.ok("extend", "--hours", "2")  # what was typed before: it counts from the earliest end
    assert (ends(cli), timers(cli)) == (after, {iso(after)})
    assert "warning" not in cli("status").stderr


DENIED = {"CreateTags": {"code": "UnauthorizedOperation", "status": 403, "calls": 1}}


def test_extension_that_is_refused_changes_nothing_and_says_why(simulator: Any, cli: Any, ec2: Any) -> None:
    """Of two that have read the same deadline the second; where AWS refuses the tags; where a node is
    connected and its commands fail from before the first one on, whose tag `status` would call overdue; and
    where no node can be reached."""
    cli.ok("up", "-n", "1", "-t", "g5.12xlarge", "--max-hours", "1")
    state = state_of(cli)
    before = datetime.fromisoformat(state["expires"])
    folder = ClusterFolder(state["cluster_id"], root=Path(simulator.home))
    with folder.exclusive(lambda: None):
        both = {hours: cli.start("extend", "--hours", f"{hours}") for hours in (3, 1)}
        for process in both.values():
            lines_until(process.stderr, "waiting for another cloudddp command")
    errors = {hours: process.communicate(60)[1] for hours, process in both.items()}
    codes = {process.returncode: hours for hours, process in both.items()}
    assert set(codes) == {0, 1}, errors
    after = before + timedelta(hours=codes[0])
    assert (ends(cli), timers(cli)) == (after, {iso(after)})
    assert "another command has moved the deadline of node 0 meanwhile" in errors[codes[1]]

    cli.ok("sim", "conditions", json.dumps({"reject": DENIED}))
    try:
        assert "ec2:CreateTags" in cli.fails(1, "extend", "--hours", "2")
    finally:
        cli.ok("sim", "conditions", "--clear")
    assert (ends(cli), timers(cli)) == (after, {iso(after)})
    assert "warning" not in cli("status").stderr

    (node,) = listed_nodes(cli)
    (programs,) = Path(simulator.home).glob(f"**/{node['instance_id']}/bin")
    (programs / "date").write_text("#!/bin/sh\nexit 1\n")
    (programs / "date").chmod(0o755)
    earlier = (datetime.now(UTC) + timedelta(minutes=30)).replace(microsecond=0)
    assert "is not confirmed by node 0" in cli.fails(1, "extend", "--until", earlier.isoformat())
    assert (ends(cli), timers(cli)) == (after, {iso(after)})

    ec2.stop_instances(InstanceIds=[node["instance_id"]])
    assert "is stop" in cli.fails(1, "extend", "--hours", "2")
    assert ends(cli) == after
