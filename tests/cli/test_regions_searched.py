"""A cluster is looked for wherever it can be: configured, recorded and enabled regions, before anything says
that there is none."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.harness import CommandLine, instances_of, remaining, wait_for

BOTH = '[cluster]\nregions = ["us-east-1", "us-west-2"]\n'


@pytest.fixture
def alone(cli: CommandLine, tmp_path: Path) -> CommandLine:
    """The command line with a state folder of its own: no clusters of other tests."""
    cli.env.update(CLOUDDDP_HOME=str(tmp_path / "state"), CLOUDDDP_PRICE="1")
    return cli


@pytest.fixture
def elsewhere(alone: CommandLine, other_region: Any, tmp_path: Path) -> CommandLine:
    """The command line of another computer of the same user, whose cluster is in us-west-2."""
    alone.ok("--region", "us-west-2", "up", "-n", "1")
    alone.env["CLOUDDDP_HOME"] = str(tmp_path / "other-computer")
    return alone


@pytest.mark.parametrize("toml", [BOTH, ""], ids=["configured", "enabled"])
def test_down_finds_a_cluster_in_another_region(elsewhere: CommandLine, other_region: Any, toml: str) -> None:
    elsewhere.write("cloudddp.toml", toml)
    (shown,) = json.loads(elsewhere.ok("status", "--json"))
    assert shown["region"] == "us-west-2"
    done = elsewhere("down", "-y")
    assert done.returncode == 0, done.stderr
    assert "us-west-2" in done.stderr
    assert "1 node terminated" in done.stdout
    assert remaining(other_region, elsewhere.cluster).nothing


@pytest.mark.parametrize("action", ["DescribeInstances@us-west-2", "DescribeRegions"])
@pytest.mark.parametrize("code", ["UnauthorizedOperation", "AuthFailure", "InternalError"])
def test_down_reports_a_region_that_cannot_be_asked(
    alone: CommandLine, faults: Any, action: str, code: str
) -> None:
    status = 500 if code == "InternalError" else 403
    faults.fail(
        action, code, times=5, status=status, message="AWS was not able to validate the access credentials"
    )
    done = alone("down", "-y")
    assert done.returncode == 3, done.stderr
    assert "nothing to do" not in done.stdout
    assert ("us-west-2" if "@" in action else "other regions") in done.stderr
    assert "us-east-1" in done.stderr
    assert "down --region" in done.stderr


def test_down_releases_addresses_without_nodes_in_another_region(
    alone: CommandLine, other_region: Any, tmp_path: Path
) -> None:
    alone.env["CLOUDDDP_PRICE"] = "30"
    alone.ok("--region", "us-west-2", "up", "-n", "2", "-t", "p4d.24xlarge")
    other_region.terminate_instances(InstanceIds=instances_of(other_region, alone.cluster))
    wait_for(lambda: not instances_of(other_region, alone.cluster), "the nodes have ended")
    assert remaining(other_region, alone.cluster).addresses
    done = alone("down", "-y", CLOUDDDP_HOME=str(tmp_path / "other"))
    assert done.returncode == 0, done.stderr
    assert "2 Elastic IPs deleted" in done.stdout
    assert remaining(other_region, alone.cluster).nothing


def test_cluster_of_a_colleague_does_not_end_the_search(elsewhere: CommandLine, other_region: Any) -> None:
    """It has the same name, in a configured region."""
    tags = {
        "cloudddp:cluster": elsewhere.cluster,
        "cloudddp:cluster-id": "c-0123456789",
        "cloudddp:owner": "alice",
    }
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    launched = boto3.client(
        "ec2",
        endpoint_url=elsewhere.env["AWS_ENDPOINT_URL"],
        region_name="eu-west-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    image = launched.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    made = launched.run_instances(
        ImageId=image,
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": pairs}],
    )
    try:
        elsewhere.write("cloudddp.toml", '[cluster]\nregions = ["us-east-1", "eu-west-1"]\n')
        assert elsewhere("down", "-y").returncode == 0
        assert remaining(other_region, elsewhere.cluster).nothing
        assert len(instances_of(launched, elsewhere.cluster)) == 1
    finally:
        launched.terminate_instances(InstanceIds=[made["Instances"][0]["InstanceId"]])


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "AuthFailure"])
def test_down_goes_on_if_the_first_region_refuses_to_answer(
    elsewhere: CommandLine, other_region: Any, faults: Any, code: str
) -> None:
    elsewhere.write("cloudddp.toml", BOTH)
    message = "AWS was not able to validate the access credentials"
    faults.fail("DescribeInstances@us-east-1", code, status=403, message=message, times=9)
    done = elsewhere("down", "-y")
    assert done.returncode == 0, done.stderr
    assert "may run where AWS could not be asked: us-east-1" in done.stderr
    assert remaining(other_region, elsewhere.cluster).nothing


def test_down_names_the_regions_without_the_cluster(alone: CommandLine, faults: Any) -> None:
    done = alone("down", "-y")
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert {"us-east-1", "us-west-2", "eu-central-1"} <= set(re.findall(r"[\w-]+", done.stdout))
    shown = alone("status")
    assert shown.returncode == 1
    assert re.search(r"and \d+ other regions", shown.stderr)


@pytest.mark.parametrize("first", ["us-west-2", "us-east-1"], ids=["elsewhere", "configured"])
def test_down_refuses_to_choose_between_regions(
    alone: CommandLine, other_region: Any, tmp_path: Path, first: str
) -> None:
    regions = (first, "us-east-2")
    try:
        for region in regions:
            alone.ok("--region", region, "up", "-n", "1")
        done = alone("down", "-y", CLOUDDDP_HOME=str(tmp_path / "other"))
        assert done.returncode == 3
        for region in regions:
            assert f"down --region {region}" in done.stderr
        listed = json.loads(alone.ok("ls", "--all-regions", "--json"))
        left = sorted(one["region"] for one in listed if one["cluster"] == alone.cluster)
        assert left == sorted(regions)
    finally:
        for region in regions:
            alone("--region", region, "down", "-y")


@pytest.mark.parametrize(
    "words", [("status",), ("jobs",), ("pull",), ("ssh", "0"), ("allow-me",), ("down", "-y")]
)
def test_explicit_region_without_the_cluster_names_the_right_one(
    alone: CommandLine, other_region: Any, words: tuple[str, ...]
) -> None:
    alone.ok("--region", "us-west-2", "up", "-n", "1")
    done = alone("--region", "us-east-1", *words)
    assert done.returncode == 1
    assert "has no nodes any more" not in done.stderr
    assert f"cluster '{alone.cluster}' is in us-west-2, not in us-east-1" in done.stderr
    assert f"{words[0]} --region us-west-2" in done.stderr or "--region us-west-2" in done.stderr
    assert len(instances_of(other_region, alone.cluster)) == 1


def test_ls_lists_other_regions_and_names_the_region(elsewhere: CommandLine) -> None:
    shown = elsewhere.ok("ls", "--all-regions")
    (line,) = [line for line in shown.splitlines() if line.startswith(elsewhere.cluster)]
    assert "us-west-2" in line


def test_up_finds_the_cluster_that_it_has_created_in_another_region(
    alone: CommandLine, remains: Any, other_region: Any
) -> None:
    alone.ok("up", "-n", "1", "--regions", "us-west-2")
    done = alone("up", "-n", "1")
    assert "already up" in done.stdout
    assert remains().nothing


def test_cluster_that_is_known_here_costs_no_further_call(alone: CommandLine, faults: Any) -> None:
    alone.ok("up", "-n", "1")
    faults.calls.clear()
    alone.ok("status")
    alone.ok("down", "-y")
    assert "DescribeRegions" not in faults.calls
    assert faults.calls[:3] == ["DescribeInstances", "DescribeInstances", "DescribeInstances"]


# -- a broken configuration ----------------------------------------------------------------------------------


BROKEN = {
    "misspelt key": "max_huors = 2",
    "unknown section": "[clutser]\nnodes = 2",
    "wrong value": 'nodes = "many"',
    "contradiction": 'proxy_jump = "a@b"\nproxy_command = "nc %h %p"',
    "invalid TOML": "nodes = ",
    "not UTF-8": "# \udcff",
    "unknown region": 'region = "us-esat-1"',
}


@pytest.mark.parametrize("why", BROKEN)
def test_broken_configuration_does_not_block_down(alone: CommandLine, remains: Any, why: str) -> None:
    """Only the name is needed, and the file says it."""
    del alone.env["CLOUDDDP_CLUSTER"]
    alone.ok("-c", alone.cluster, "up", "-n", "1")
    text = f'[cluster]\nname = "{alone.cluster}"\n{BROKEN[why]}\n'
    (alone.cwd / "cloudddp.toml").write_bytes(text.encode(errors="surrogateescape"))
    assert alone("sync").returncode == 2
    shown = alone("status", "--json")
    assert (shown.returncode, json.loads(shown.stdout)[0]["cluster"]) == (0, alone.cluster)
    assert "warning: " in shown.stderr
    assert alone.cluster in alone.ok("ls")
    done = alone("down", "-y")
    assert done.returncode == 0, done.stderr
    assert "warning: " in done.stderr
    assert remains().nothing


UNCERTAIN = [
    'nodes = \nname = "mine"',
    '[cluster]\nnodes = \nname = "mine"',
    '[cluster]\nnmae = "mine"',
    '[cluster]\nname = "No Name"',
    '[clutser]\nname = "mine"',
    'name = "mine"',
    '[job]\nname = "mine"',
    '[cluster]\nNAME = "mine"',
    '[cluster.main]\nname = "mine"',
    '[tool.cloudddp.cluster]\nname = "mine"',
]


def test_down_does_not_guess_a_name(alone: CommandLine, remains: Any, faults: Any) -> None:
    """The cluster that is called as the default would be is not the one that the file means."""
    alone.env.pop("CLOUDDDP_CLUSTER")
    for text in UNCERTAIN:
        alone.write("cloudddp.toml", text)
        for words in (("down", "-y"), ("status",), ("pull",)):
            done = alone(*words)
            assert done.returncode == 2, (text, done.stderr)
            assert f"{words[0]} -c NAME" in done.stderr
    assert faults.calls == []
    assert alone("ls").returncode == 0
    assert alone("-c", alone.cluster, "down", "-y").returncode == 0


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("CLOUDDDP_NODES", "many", 0),
        ("CLOUDDDP_MAX_HUORS", "2", 0),
        ("CLOUDDDP_CLUSTR", "mine", 2),
        ("CLOUDDDP_NAME", "mine", 2),
    ],
)
def test_broken_variable_and_down(alone: CommandLine, variable: str, value: str, code: int) -> None:
    alone.env.pop("CLOUDDDP_CLUSTER")
    alone.env[variable] = value
    done = alone("down", "-y")
    assert done.returncode == code, done.stderr
    assert variable in done.stderr
    assert alone("-c", alone.cluster, "down", "-y").returncode == 0


def test_unreadable_file_and_down(alone: CommandLine) -> None:
    del alone.env["CLOUDDDP_CLUSTER"]
    done = alone("--config", "missing.toml", "down", "-y")
    assert done.returncode == 2
    assert "down -c NAME" in done.stderr
    assert alone("--config", "missing.toml", "-c", alone.cluster, "down", "-y").returncode == 0


def test_down_with_a_broken_configuration_does_not_choose_a_region(
    alone: CommandLine, other_region: Any, remains: Any, tmp_path: Path
) -> None:
    """The region that the file means may be the part that is not understood."""
    alone.ok("--region", "us-east-1", "up", "-n", "1")
    alone.ok("--region", "us-west-2", "up", "-n", "1")
    alone.write("cloudddp.toml", '[cluster]\nregoin = "us-west-2"\n')
    done = alone("down", "-y", CLOUDDDP_HOME=str(tmp_path / "other"))
    assert done.returncode == 3, done.stderr
    assert len(remains().instances) == 1
    assert len(instances_of(other_region, alone.cluster)) == 1


# -- other running clusters ----------------------------------------------------------------------------------


def test_up_and_down_name_the_other_clusters_with_their_price(alone: CommandLine, tmp_path: Path) -> None:
    """Also from another computer of the same user."""
    first, second = f"{alone.cluster}-a", f"{alone.cluster}-b"
    try:
        alone.ok("-c", first, "up", "-n", "1")
        shown = alone("-c", second, "up", "-n", "1", CLOUDDDP_HOME=str(tmp_path / "other"))
        line = f"your cluster {first} in us-east-1 also runs: 1 node, $1."
        assert line in shown.stderr
        assert f"cloudddp down -c {first} --region us-east-1" in shown.stderr
        assert line in alone("-c", second, "down", "-y").stderr
        (row,) = [one for one in alone.ok("ls").splitlines() if one.startswith(first)]
        assert "$1." in row
    finally:
        for name in (first, second):
            alone("-c", name, "down", "-y")


def test_down_names_the_other_clusters_in_the_regions_that_are_recorded_here(
    alone: CommandLine, other_region: Any, faults: Any
) -> None:
    """With one call for each of them."""
    name = f"{alone.cluster}-b"
    alone.ok("--region", "us-west-2", "up", "-n", "1")
    alone.ok("-c", name, "up", "-n", "1")
    faults.calls.clear()
    before = faults.count("DescribeInstances@us-west-2")
    done = alone("-c", name, "down", "-y")
    assert done.returncode == 0, done.stderr
    assert f"your cluster {alone.cluster} in us-west-2 also runs: 1 node, $1." in done.stderr
    assert f"cloudddp down -c {alone.cluster} --region us-west-2" in done.stderr
    assert "DescribeRegions" not in faults.calls
    assert faults.count("DescribeInstances@us-west-2") == before + 1
    faults.fail("DescribeInstances@us-west-2", "UnauthorizedOperation", times=9)
    alone.ok("-c", name, "up", "-n", "1")
    assert alone("-c", name, "down", "-y").returncode == 0  # a reminder, no reason to fail
    faults.clear()
    alone.ok("--region", "us-west-2", "down", "-y")


def test_down_names_the_other_clusters_in_the_regions_that_it_searches(
    elsewhere: CommandLine, other_region: Any
) -> None:
    done = elsewhere("-c", f"{elsewhere.cluster}-b", "down", "-y")
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert f"your cluster {elsewhere.cluster} in us-west-2 also runs: 1 node, $1." in done.stderr


@pytest.mark.parametrize(
    ("option", "code"), [("--max-cost=1", 1), ("--max-hours=1", 1), ("--max-cost=20", 0)]
)
def test_up_of_a_cluster_beyond_the_limits_fails(alone: CommandLine, option: str, code: int) -> None:
    alone.ok("up", "-n", "1", "--max-hours", "2")
    again = alone("up", "-n", "1", option)
    assert again.returncode == code, again.stderr
    assert (option.replace("=", " ") in again.stderr) == bool(code)
    assert len(json.loads(alone.ok("status", "--json"))[0]["nodes"]) == 1


# -- local state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGKILL"])
@pytest.mark.parametrize("file", ["cluster.json", "id_ed25519", "host_key.pub", "journal.jsonl"])
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
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGKILL), err
    keys = Path(alone.env["CLOUDDDP_HOME"]) / "clusters"
    assert signal_name == "SIGKILL" or not list(keys.glob("*/id_ed25519"))
    alone.ok("down", "-y")
    assert not list(keys.glob("*/id_ed25519"))
    assert remains().nothing
