"""`cloudddp up`: what it creates, what it refuses, and that nothing is left when it fails."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.faults import without_element
from support.harness import clean_environment, interrupt, wait_for

EVERY_CALL = {
    "DescribeInstances",
    "DescribeInstanceTypes",
    "GetParameter",
    "DescribeImages",
    "DescribeVpcs",
    "DescribeSubnets",
    "DescribeInstanceTypeOfferings",
    "DescribeRouteTables",
    "DescribeVpcBlockPublicAccessOptions",
    "GetProducts",
    "GetCallerIdentity",
    "ImportKeyPair",
    "CreateSecurityGroup",
    "AuthorizeSecurityGroupIngress",
    "AuthorizeSecurityGroupEgress",
    "CreatePlacementGroup",
    "RunInstances",
    "RunInstances (dry run)",
}


def test_up_creates_the_requested_cluster(cli: Any, ec2: Any) -> None:
    out = cli.ok("up", "-n", "2", "-t", "g5.xlarge", "--max-hours", "3")
    assert "is ready" in out
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    found = [i for r in ec2.describe_instances(Filters=where)["Reservations"] for i in r["Instances"]]
    assert len(found) == 2
    for instance in found:
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        assert {
            "cloudddp:cluster",
            "cloudddp:cluster-id",
            "cloudddp:owner",
            "cloudddp:created",
            "cloudddp:expires",
            "cloudddp:version",
        } <= set(tags)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", tags["cloudddp:expires"])
        assert instance["MetadataOptions"]["HttpTokens"] == "required"
        attribute = ec2.describe_instance_attribute(
            InstanceId=instance["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert attribute["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    (group,) = ec2.describe_security_groups(Filters=where)["SecurityGroups"]
    to_itself = [{"GroupId": group["GroupId"]}]
    inside = [p for p in group["IpPermissions"] if p["IpProtocol"] == "-1"]
    assert [{"GroupId": pair["GroupId"]} for p in inside for pair in p["UserIdGroupPairs"]] == to_itself
    outside = [pair for p in group["IpPermissionsEgress"] for pair in p["UserIdGroupPairs"]]
    assert [{"GroupId": pair["GroupId"]} for pair in outside] == to_itself
    ssh = [r["CidrIp"] for p in group["IpPermissions"] if p["IpProtocol"] == "tcp" for r in p["IpRanges"]]
    assert ssh == ["127.0.0.1/32"]
    volumes = ec2.describe_volumes(Filters=where)["Volumes"]
    assert {(v["VolumeType"], v["Encrypted"], v["Size"]) for v in volumes} == {("gp3", True, 150)}


def test_second_up_changes_nothing(cli: Any, faults: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    before = remains()
    faults.calls.clear()
    again = cli("up", "-n", "1", "--max-hours", "20", "--max-cost", "100")
    assert again.returncode == 0
    assert "nothing was changed" in again.stdout
    assert remains() == before
    assert set(faults.calls) == {"DescribeInstances"}


def test_up_with_other_settings_is_refused(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    before = remains()
    other = cli("up", "-n", "2")
    assert other.returncode == 1
    assert "it has 1 node, 2 were requested" in other.stderr
    assert remains() == before


def test_max_cost_shortens_the_lifetime(cli: Any) -> None:
    done = cli("up", "-n", "1", "--max-cost", "0.6")
    assert done.returncode == 0
    hours = float(re.search(r"in (\d+) min", done.stderr).group(1)) / 60
    assert 0.5 < hours < 0.6  # 0.6 USD at 1.006 + disk and address an hour


def test_missing_credentials_are_reported(cli: Any) -> None:
    cli.env = {**clean_environment(AWS_REGION="us-east-1"), "CLOUDDDP_HOME": cli.env["CLOUDDDP_HOME"]}
    done = cli("up", "-y")
    assert done.returncode == 1
    assert "no AWS credentials" in done.stderr
    assert "aws configure" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("up", "--region", "us-esat-1"), "'us-east-1'"),
        (("up", "-t", "g5.xlarg"), "g5.xlarge"),
        (("up", "-t", "p99.huge"), "unknown instance type 'p99.huge'"),
        (("up", "-n", "0"), "a whole number from 1 to 256"),
        (("up", "--max-hours", "0"), "max_hours"),
        (("up", "--max-hours", "inf"), "max_hours"),
        (("up", "--max-cost=-1"), "max_cost"),
        (("up", "--disk-gb", "huge"), "disk_gb"),
        (("-c", "a;rm -rf /", "up"), "cluster.name"),
        (("launch", "nowhere.py"), "script not found: nowhere.py"),
        (("launch", "--env", "1X=2", "ok.py"), "'1X' is not the name of a variable"),
        (("launch", "--nproc-per-node", "0", "ok.py"), "nproc_per_node"),
        (("run", "nowhere.py"), "script not found: nowhere.py"),
    ],
)
def test_bad_usage_exits_2_before_any_call(
    cli: Any, faults: Any, words: tuple[str, ...], message: str
) -> None:
    cli.write("ok.py", "")
    done = cli(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert faults.calls == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster]\nnodez = 2\n", "did you mean 'nodes'"),
        ("[clustr]\nnodes = 2\n", "did you mean 'cluster'"),
        ("[job]\nmax_hours = 2\n", "put it under [cluster]"),
        ("nodes = 2\n", "put it under [cluster]"),
        ("[cluster]\nnodes = \n", "not valid TOML"),
        ("[cluster]\nnodes = 1000\n", "cluster.nodes = 1000"),
    ],
)
def test_bad_configuration_names_file_and_key(cli: Any, faults: Any, text: str, message: str) -> None:
    path = cli.write("cloudddp.toml", text)
    done = cli("up")
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert message in done.stderr
    assert faults.calls == []


def test_misspelt_environment_variable_is_an_error(cli: Any, faults: Any) -> None:
    done = cli("up", CLOUDDDP_MAX_COSTS="5")
    assert done.returncode == 2
    assert "CLOUDDDP_MAX_COST'" in done.stderr
    assert faults.calls == []


def test_type_without_gpu_needs_allow_cpu(cli: Any, faults: Any) -> None:
    done = cli("up", "-t", "t3.micro", "--price", "0.01")
    assert done.returncode == 2
    assert "t3.micro has no GPU" in done.stderr
    assert "--allow-cpu" in done.stderr
    assert not any(call.startswith(("Run", "Create", "Import")) for call in faults.calls)
    assert "is ready" in cli.ok("up", "-n", "1", "-t", "t3.micro", "--price", "0.01", "--allow-cpu")


def test_unknown_price_is_refused(cli: Any, faults: Any) -> None:
    done = cli("up", "-t", "t3.micro", "--allow-cpu")
    assert done.returncode == 2
    assert "--price" in done.stderr
    assert "RunInstances" not in faults.calls


def test_missing_default_vpc_has_a_hint(cli: Any, faults: Any, remains: Any) -> None:
    faults.rewrite("DescribeVpcs", without_element("vpcSet"))
    done = cli("up")
    assert done.returncode == 2
    assert "no default VPC" in done.stderr
    assert "--vpc" in done.stderr
    assert remains().nothing


def test_insufficient_capacity_leaves_nothing(cli: Any, faults: Any, remains: Any) -> None:
    faults.fail("RunInstances", "InsufficientInstanceCapacity", times=200, status=500)
    done = cli("up")
    assert done.returncode == 1
    assert "InsufficientInstanceCapacity" in done.stderr
    assert "--regions" in done.stderr
    assert remains().nothing


_MAY_BE_DENIED = {"DescribeInstances", "DescribeVpcBlockPublicAccessOptions", "GetProducts"}


@pytest.mark.parametrize("action", sorted(EVERY_CALL - _MAY_BE_DENIED))
def test_refused_call_leaves_nothing(cli: Any, faults: Any, remains: Any, action: str) -> None:
    faults.fail(action, "UnauthorizedOperation", times=20)
    done = cli("up", "-n", "2")
    assert done.returncode == 1
    assert "UnauthorizedOperation" in done.stderr
    assert faults.count(action) == 1
    assert remains().nothing


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("IdempotentInstanceTerminated", "then `cloudddp up` again"),
        ("IdempotentParameterMismatch", "then `cloudddp up` again"),
        ("InsufficientAddressCapacity", "wait some minutes"),
    ],
)
def test_refused_launch_has_a_hint(cli: Any, faults: Any, remains: Any, code: str, message: str) -> None:
    faults.fail("RunInstances", code, times=20)
    done = cli("up", "-n", "1")
    assert done.returncode == 1
    assert code in done.stderr
    assert message in done.stderr
    assert remains().nothing


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
        ("RunInstances", "InvalidGroup.NotFound"),
        ("RunInstances", "InvalidSecurityGroupID.NotFound"),
    ],
)
def test_call_is_repeated_until_aws_finds_the_group(cli: Any, faults: Any, action: str, code: str) -> None:
    """EC2 is eventually consistent: the next call may not know a new group yet."""
    faults.fail(action, code, times=2)
    assert "is ready" in cli.ok("up", "-n", "1")
    assert faults.count(action) == 3


def test_nodes_without_visible_tags_are_terminated_by_id(cli: Any, faults: Any, remains: Any) -> None:
    launched, release = faults.hold("RunInstances")
    faults.rewrite("DescribeInstances", without_element("reservationSet"))
    process = cli.start("up", "-n", "2")
    assert launched.wait(60)
    process.send_signal(signal.SIGINT)
    release.set()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert not remains().instances


def test_failed_rollback_exits_3(cli: Any, faults: Any, remains: Any) -> None:
    faults.fail("AuthorizeSecurityGroupEgress", "UnauthorizedOperation")
    faults.fail("DeleteSecurityGroup", "UnauthorizedOperation", times=20)
    done = cli("up", "-n", "1")
    assert done.returncode == 3
    (group,) = remains().groups
    assert group in done.stderr


def test_node_without_ssh_is_not_left_running(cli: Any, faults: Any, remains: Any) -> None:
    faults.rewrite("DescribeInstances", lambda body: re.sub(rb"127\.\d+\.128\.\d+", b"127.1.2.3", body))
    began = time.monotonic()
    done = cli("up", "-n", "1", CLOUDDDP_READY_MINUTES="0.1")
    took = time.monotonic() - began
    assert done.returncode == 1
    assert "connection refused" in done.stderr
    (tried,) = re.findall(r"gave up after (\d+) s", done.stderr)
    assert 6 <= int(tried) <= took + 1
    assert "every node was removed" in done.stderr
    assert "for an image that boots more slowly, set a larger ready_minutes" in done.stderr
    assert "`cloudddp status`" not in done.stderr  # the node no longer exists
    assert remains().nothing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_run_instances_leaves_nothing(
    cli: Any, faults: Any, remains: Any, number: int
) -> None:
    launched, release = faults.hold("RunInstances")
    process = cli.start("up", "-n", "2")
    assert launched.wait(60)
    assert remains().instances  # they exist, and `up` does not know their ids yet
    process.send_signal(number)
    release.set()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "nothing was left running" in err
    assert remains().nothing


def test_interrupt_while_waiting_for_ssh_leaves_nothing(cli: Any, faults: Any, remains: Any) -> None:
    faults.rewrite("DescribeInstances", lambda body: re.sub(rb"127\.\d+\.128\.\d+", b"127.1.2.3", body))
    process = cli.start("up", "-n", "2")
    wait_for(lambda: remains().instances and faults.count("DescribeInstances") > 1, "nodes running")
    code, _, err = interrupt(process)
    assert code == 130, err
    assert remains().nothing


def test_unexpected_host_key_is_refused(cli: Any) -> None:
    from cloudddp.ssh.target import generate_key

    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    folder = Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster["cluster_id"]
    record = {cluster["nodes"][0]["instance_id"]: {"current": generate_key().public}}
    (folder / "host_keys.json").write_text(json.dumps(record))
    done = cli("jobs")
    assert done.returncode == 1
    assert "host key is not the one recorded for this node: refused" in done.stderr


def test_number_of_aws_calls_is_independent_of_nodes(tmp_path: Any) -> None:
    """Counted in a dry run, where instances run at once, so that no poll adds calls."""
    pytest.importorskip("moto")
    from cloudddp.aws.client import AWS
    from cloudddp.cli.actions.rehearsal import Nodes
    from cloudddp.cluster import up
    from cloudddp.config.spec import ClusterSpec
    from cloudddp.sim.aws import rehearse

    counts = {}
    with rehearse(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUDDDP_HOME", str(tmp_path))
        for nodes in (2, 8, 64):
            calls: list[str] = []
            aws = AWS(region="us-east-1", observe=lambda _, method, *__, calls=calls: calls.append(method))
            result = up.up(
                [aws],
                ClusterSpec(name=f"n{nodes}", nodes=nodes),
                progress=lambda _: None,
                dial=lambda found, *_: Nodes(found, gpus=1, cpus=4),
                ssh_sources=lambda *_: ("203.0.113.7/32",),
            )
            assert len(result.cluster.nodes) == nodes
            counts[nodes] = len(calls)
    assert counts[2] == counts[8] == counts[64]
    # also DescribeInstances after RunInstances and at the end, and DescribeKeyPairs for the name lock
    assert counts[2] == len(EVERY_CALL) + 3


def test_duplicate_group_after_a_lost_answer_is_used(cli: Any, faults: Any) -> None:
    """The first answer is lost after the group was created, and botocore repeats the call: AWS answers
    Duplicate."""
    faults.lose_answer("CreateSecurityGroup")
    assert "is ready" in cli.ok("up", "-n", "1")
    assert faults.count("CreateSecurityGroup") == 2
