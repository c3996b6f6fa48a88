"""`up` with several types and two markets: the first one with capacity is launched, and later commands accept
it."""

from __future__ import annotations

import json
import re
from typing import Any

from support.harness import remaining, running_instances

ZONE = ("--zones", "us-east-1a")  # each refused launch costs a second: botocore repeats it


def none_of(*types: str) -> dict[str, Any]:
    return {ZONE[1]: dict.fromkeys(types, 0)}


def nodes(ec2: Any, cluster: str) -> list[tuple[str, str]]:
    """Type and market of each live node."""
    found = running_instances(ec2, cluster)
    return sorted((i["InstanceType"], i.get("InstanceLifecycle", "on demand")) for i in found)


def test_next_type_is_launched_and_accepted_later(cli: Any, conditions: Any, ec2: Any) -> None:
    """Nothing is left of the type without capacity. max_cost is a deadline from the price of what runs."""
    conditions(capacity=none_of("g6.xlarge"), prices={"g6.xlarge": 1.0, "g5.xlarge": 4.0})
    done = cli.exits(0, "up", "-n", "2", "-t", "g6.xlarge,g5.xlarge", "--max-cost", "8.5", *ZONE)
    assert "trying 2 x g6.xlarge on demand in us-east-1" in done.stderr
    assert "trying 2 x g5.xlarge on demand in us-east-1" in done.stderr
    first, _, other = done.stderr.partition("else g5.xlarge on demand, ")
    assert re.search(r"deadline  .*, in 4 h 0\d min", first)
    assert re.search(r"^\$8\.\d\d an hour, at most \$8\.\d\d in 1 h 0\d min$", other, re.MULTILINE)
    assert nodes(ec2, cli.cluster) == [("g5.xlarge", "on demand")] * 2
    assert re.search(r"is ready; its nodes terminate in 1 h 0\d min", done.stdout)
    assert (len(remaining(ec2, cli.cluster).groups), len(remaining(ec2, cli.cluster).keys)) == (1, 1)
    assert "is already up" in cli.ok("up", "-n", "2", "-t", "g6.xlarge,g5.xlarge")
    err = cli.fails(1, "up", "-n", "2", "-t", "g6.xlarge,g4dn.xlarge")
    assert "its nodes are g5.xlarge, g6.xlarge or g4dn.xlarge was requested" in err


def test_plan_shows_every_candidate(cli: Any, conditions: Any, ec2: Any) -> None:
    conditions(capacity=none_of("g5.xlarge", "p4d.24xlarge"), spot_prices={"us-east-1a": {"g5.xlarge": 0.11}})
    err = cli.fails(1, "up", "-n", "2", "-t", "p4d.24xlarge,g5.xlarge", "--spot", "prefer", *ZONE)
    plan = err.partition("trying")[0]
    assert "2 x p4d.24xlarge (8 x NVIDIA A100 each)\n  price     spot, at most $" in plan
    others = re.findall(r"^            else (.*?), (now \$0.11)?", plan, re.MULTILINE)
    assert others == [
        ("p4d.24xlarge on demand", ""),
        ("g5.xlarge spot", "now $0.11"),
        ("g5.xlarge on demand", ""),
    ]
    assert "2 x p4d.24xlarge or g5.xlarge could not be launched in any of these zones:" in err
    assert re.search(r"^  g5.xlarge spot us-east-1a +Insufficient", err, re.MULTILINE)
    assert re.search(r"^  p4d.24xlarge on demand us-east-1a +Insufficient", err, re.MULTILINE)
    assert remaining(ec2, cli.cluster).nothing


def test_spot_is_preferred_and_a_lost_node_is_replaced_on_demand(cli: Any, conditions: Any, ec2: Any) -> None:
    """The option is remembered: `resume` has none for the market. A further one is a spot instance again."""
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    cli.write("script.py", "raise SystemExit(3)\n")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", "--spot", "prefer", *ZONE)
    assert nodes(ec2, cli.cluster) == [("g5.12xlarge", "spot")] * 2
    # The tag holds the on-demand price; a spot node costs no more than that.
    cost = r"\n  spot, at most \$\d+\.\d\d an hour, at most \$0\.\d\d so far; "
    assert re.search(cost, cli.ok("status"))
    (status,) = json.loads(cli.ok("status", "--json"))
    assert (status["usd_per_hour_is_at_most"], status["usd_so_far_is_at_most"]) == (True, True)
    assert cli("launch", "script.py").returncode == 3
    conditions(spot_capacity=none_of("g5.12xlarge"))
    assert "no spot instance in us-east-1" in cli.fails(3, "resume", "--replace", "1")
    assert nodes(ec2, cli.cluster) == [("g5.12xlarge", "on demand"), ("g5.12xlarge", "spot")]
    assert re.search(r"this cost at most \$\d\.\d\d on AWS, at the on-demand price", cli.ok("down", "-y"))
    assert remaining(ec2, cli.cluster).nothing


def test_doctor_checks_each_candidate(cli: Any, conditions: Any) -> None:
    """It passes if one of them would work."""
    conditions(quota={"on-demand-p": 8})
    found = json.loads(cli.ok("doctor", "-n", "2", "-t", "p5.48xlarge,g5.xlarge", "--json"))
    status = {one["name"]: one["status"] for one in found}
    assert status["p5.48xlarge on demand: quota"] == "fail"
    assert status["g5.xlarge on demand: quota"] == "pass"
    assert "g5.xlarge on demand: image" not in status  # as that of the first one
    conditions(quota={"on-demand-g": 0})
    assert cli("doctor", "-n", "2", "-t", "p5.48xlarge,g5.xlarge").returncode == 1
