"""A cluster is looked for wherever it can be: configured, recorded and enabled regions, before anything says
that there is none."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, instances_of, remaining
from support.simlab import client_of
from support.tagged import tagged_instance

# Others are not enabled for the account: each costs a search time.
REGIONS = {"af-south-1", "eu-central-1", "eu-west-1", "us-east-1", "us-east-2", "us-west-2"}


@pytest.fixture
def alone(cli: CommandLine, tmp_path: Path, ec2: Any, conditions: Any) -> CommandLine:
    """The command line with a state folder of its own: no clusters of other tests."""
    every = {one["RegionName"] for one in ec2.describe_regions()["Regions"]}
    conditions(regions=dict.fromkeys(every - REGIONS, "not-opted-in"))
    cli.env.update(CLOUDDDP_HOME=str(tmp_path / "state"), CLOUDDDP_PRICE="1")
    return cli


@pytest.fixture
def elsewhere(alone: CommandLine, other_region: Any) -> CommandLine:
    """The command line of another computer of the same user, whose cluster is in us-west-2."""
    tagged_instance(other_region, alone.cluster)
    return alone


def test_down_finds_a_cluster_in_another_region(elsewhere: CommandLine, other_region: Any) -> None:
    """Also with a broken configuration: only the name is needed, and the file says it.
    tests/unit/test_setting_sources.py has each way to break it."""
    del elsewhere.env["CLOUDDDP_CLUSTER"]
    name = f'name = "{elsewhere.cluster}"'
    elsewhere.write("cloudddp.toml", f'[cluster]\n{name}\nmax_huors = 2\nregion = "us-esat-1"\n')
    assert elsewhere("sync").returncode == 2
    shown = elsewhere.exits(0, "status", "--json")
    (found,) = json.loads(shown.stdout)
    assert (found["cluster"], found["region"]) == (elsewhere.cluster, "us-west-2")
    assert "warning: " in shown.stderr
    (line,) = [
        one for one in elsewhere.ok("ls", "--all-regions").splitlines() if one.startswith(elsewhere.cluster)
    ]
    assert "us-west-2" in line
    done = elsewhere.exits(0, "down", "-y")
    assert "us-west-2" in done.stderr
    assert "not pulled yet: this computer has no key for cluster" in done.stderr
    assert "1 node terminated" in done.stdout
    assert remaining(other_region, elsewhere.cluster).nothing


@pytest.mark.parametrize(
    ("action", "code"),
    [("DescribeInstances@us-west-2", "UnauthorizedOperation"), ("DescribeRegions", "AuthFailure")],
)
def test_down_reports_a_region_that_cannot_be_asked(
    alone: CommandLine, faults: Any, action: str, code: str
) -> None:
    message = "AWS was not able to validate the access credentials"
    faults.fail(action, code, times=5, status=403, message=message)
    done = alone.exits(3, "down", "-y")
    assert "nothing to do" not in done.stdout
    assert ("us-west-2" if "@" in action else "other regions") in done.stderr
    assert "us-east-1" in done.stderr
    assert "down --region" in done.stderr


def test_down_releases_addresses_without_nodes_in_another_region(
    alone: CommandLine, other_region: Any
) -> None:
    tags = [
        {"Key": "cloudddp:cluster", "Value": alone.cluster},
        {"Key": "cloudddp:owner", "Value": "user/moto"},
    ]
    for _ in range(2):
        other_region.allocate_address(TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": tags}])
    assert "2 Elastic IPs deleted" in alone.ok("down", "-y")
    assert remaining(other_region, alone.cluster).nothing


def test_cluster_of_a_colleague_or_a_region_that_refuses_does_not_end_the_search(
    elsewhere: CommandLine, other_region: Any, simulator: Any, faults: Any
) -> None:
    """It has the same name, in a configured region."""
    nearer = client_of(simulator, "ec2", region_name="eu-west-1")
    foreign = tagged_instance(nearer, elsewhere.cluster, owner="alice")
    faults.fail("DescribeInstances@us-east-1", "UnauthorizedOperation", status=403, times=9)
    try:
        elsewhere.write("cloudddp.toml", '[cluster]\nregions = ["us-east-1", "eu-west-1"]\n')
        shown = elsewhere.messages("down", "-y")
        assert "may run where AWS could not be asked: us-east-1" in shown
        assert remaining(other_region, elsewhere.cluster).nothing
        assert instances_of(nearer, elsewhere.cluster) == [foreign]
    finally:
        nearer.terminate_instances(InstanceIds=[foreign])


def test_down_looks_further_than_a_first_region_that_is_not_enabled(
    elsewhere: CommandLine, other_region: Any, conditions: Any
) -> None:
    """It refuses DescribeRegions, too, and cannot have a cluster."""
    elsewhere.write("cloudddp.toml", '[cluster]\nregions = ["af-south-1", "us-east-1"]\n')
    conditions(regions={"af-south-1": "not-opted-in"})
    elsewhere.ok("down", "-y")
    assert remaining(other_region, elsewhere.cluster).nothing
    out = elsewhere.ok("down", "-y")
    assert "nothing to do" in out
    assert {"us-east-1", "us-west-2", "eu-central-1"} <= set(re.findall(r"[\w-]+", out))


def test_down_refuses_to_choose_between_regions(
    elsewhere: CommandLine, simulator: Any, other_region: Any
) -> None:
    """Also where the configuration is broken: the region that it means may be the part that is not
    understood."""
    second = client_of(simulator, "ec2", region_name="us-east-2")
    node = tagged_instance(second, elsewhere.cluster)
    try:
        elsewhere.write("cloudddp.toml", '[cluster]\nregoin = "us-west-2"\n')
        err = elsewhere.fails(3, "down", "-y")
        assert "down --region us-west-2" in err
        assert "down --region us-east-2" in err
        assert [len(instances_of(one, elsewhere.cluster)) for one in (other_region, second)] == [1, 1]
    finally:
        second.terminate_instances(InstanceIds=[node])


def test_down_does_not_guess_a_name(alone: CommandLine, faults: Any) -> None:
    """The cluster that is called as the default would be is not the one that the file means."""
    alone.env.pop("CLOUDDDP_CLUSTER")
    alone.write("cloudddp.toml", '[cluster]\nnmae = "mine"')
    for words in (("down", "-y"), ("status",), ("pull",)):
        assert f"{words[0]} -c NAME" in alone.fails(2, *words)
    assert faults.calls == []


# -- other running clusters ----------------------------------------------------------------------------------


def test_up_and_down_name_the_other_clusters_with_their_price(elsewhere: CommandLine) -> None:
    """Those of another computer of the same user, in the regions that they search. An explicit region without
    the cluster names the right one."""
    err = elsewhere.fails(1, "--region", "us-east-1", "exec", "true")
    assert f"cluster '{elsewhere.cluster}' is in us-west-2, not in us-east-1" in err
    assert "--region us-west-2" in err
    line = f"your cluster {elsewhere.cluster} in us-west-2 also runs: 1 node, $1."
    done = elsewhere.exits(0, "-c", f"{elsewhere.cluster}-b", "down", "-y")
    assert "nothing to do" in done.stdout
    assert line in done.stderr
    del elsewhere.env["CLOUDDDP_YES"]  # the plan is shown, and nothing is created
    planned = elsewhere("-c", f"{elsewhere.cluster}-b", "up", "-n", "1", "--region", "us-west-2")
    assert line in planned.stderr
    assert f"cloudddp down -c {elsewhere.cluster} --region us-west-2" in planned.stderr


# -- local state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signal_name", "file"),
    [("SIGINT", "host_key.pub"), ("SIGKILL", "journal.jsonl")],
)
def test_interrupted_up_leaves_no_private_key(
    alone: CommandLine, remains: Any, signal_name: str, file: str
) -> None:
    """Wherever it ends while it writes its state; `down` removes what a killed one has left."""
    code = (
        "import os, signal\nfrom cloudddp.files import Folder\n"
        "def ending(original):\n"
        "    def write(self, name, *more):\n"
        f"        if name == {file!r}:\n            os.kill(os.getpid(), signal.{signal_name})\n"
        "        return original(self, name, *more)\n"
        "    return write\n"
        "Folder.replace, Folder.append = ending(Folder.replace), ending(Folder.append)\n"
        "from cloudddp.__main__ import main\nmain()"
    )
    process = alone.start_code(code, "up", "-n", "1")
    _, err = process.communicate(timeout=300)
    assert process.returncode in (130, -signal.SIGKILL), err
    keys = Path(alone.env["CLOUDDDP_HOME"]) / "clusters"
    assert signal_name == "SIGKILL" or not list(keys.glob("*/id_ed25519"))
    alone.ok("down", "-y")
    assert not list(keys.glob("*/id_ed25519"))
    assert remains().nothing
