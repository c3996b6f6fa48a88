"""The permissions that each verb needs, as the simulator records them, and what a policy in infra/iam
grants."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import botocore.session
from support.harness import ROOT, CommandLine
from support.simlab import client_of

from cloudddp.simulator import control
from cloudddp.simulator.iam.operators import matches
from cloudddp.simulator.iam.services import UNCHECKED

FOLDER = ROOT / "infra" / "iam"
KEY = "simulated"  # the access key of `cloudddp --sim`
TAG = "cloudddp:cluster-id"

# Verbs that only read, and so have to work with read-only.json.
READING = ("status", "ls", "jobs", "logs", "pull")

# Needed only when something else fails.
ON_FAILURE = {
    "sts:DecodeAuthorizationMessage": "a denied call: tests/cli/test_denied_calls.py",
    "ec2:DescribeInstanceStatus": "a node that does not answer: tests/lab/product/test_in_the_lab.py",
}


def run_every_verb(cli: CommandLine, sim: control.Simulator) -> dict[str, set[str]]:
    """Run every verb that calls AWS, require success, return the permissions that each of them needed."""
    found: dict[str, set[str]] = {}
    before: dict[str, int] = {}
    for verb, done in _verbs(cli, sim):
        assert done.returncode == 0, f"{verb}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        now = control.permissions(sim).get(KEY, {})
        new = {name for name, count in now.items() if count > before.get(name, 0)}
        found.setdefault(verb, set()).update(new - set(UNCHECKED))
        before = now
    return found


def _verbs(cli: CommandLine, sim: control.Simulator) -> Iterator[tuple[str, Any]]:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    cli.write("hi.py", "import os\nos.makedirs('runs', exist_ok=True)\nopen('runs/a', 'w').write('a')\n")
    cli.write("wait.py", "import time\ntime.sleep(600)\n")
    yield "doctor", _without_warnings(cli("doctor", "-n", "2", "-t", "g5.xlarge", "--json"))
    yield "capacity", cli("capacity", "-n", "1", "-t", "p4d.24xlarge")
    with _excluded_from_a_block(sim):
        yield "up", cli("up", "-n", "2", "-t", "g5.xlarge")
    yield "up", cli("up", "-n", "2", "-t", "g5.xlarge")  # adopts it
    for line in (
        *("status", "ls --all-regions", "launch hi.py", "logs", "jobs", "pull", "exec true"),
        *("ssh 0 -- true", "sync", "launch -d wait.py", "cancel", "extend --hours 1"),
        *("allow-me", "allow-me --anyone"),
    ):
        yield line.split()[0], cli(*line.split())
    change_caller(sim, cli.cluster)
    yield "allow-me", cli("allow-me")  # replaces the rule of another address
    yield "down", cli("down", "-y")
    _leave_remains(sim, cli.cluster)
    yield "down", cli("down", "-y", "--anyone")
    yield "up", cli("up", "--spot", "-n", "1", "-t", "g5.xlarge")
    yield "down", cli("down", "-y")
    yield from _reserved_efa(cli, sim)
    yield "run", cli("run", "-n", "1", "-t", "g5.xlarge", "--discard", "hi.py")


@contextlib.contextmanager
def _excluded_from_a_block(sim: control.Simulator) -> Iterator[None]:
    """VPC Block Public Access is on, and the default VPC is excluded from it."""
    ec2 = client_of(sim, "ec2")
    vpcs = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    ec2.modify_vpc_block_public_access_options(InternetGatewayBlockMode="block-ingress")
    ec2.create_vpc_block_public_access_exclusion(
        VpcId=vpcs[0]["VpcId"], InternetGatewayExclusionMode="allow-bidirectional"
    )
    yield
    ec2.modify_vpc_block_public_access_options(InternetGatewayBlockMode="off")


def _reserved_efa(cli: CommandLine, sim: control.Simulator) -> Iterator[tuple[str, Any]]:
    """Nodes with several network cards, which have Elastic IPs, in a capacity reservation."""
    made = client_of(sim, "ec2").create_capacity_reservation(
        InstanceType="p4d.24xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone="us-east-1b",
        InstanceCount=2,
        InstanceMatchCriteria="targeted",
    )
    name = made["CapacityReservation"]["CapacityReservationId"]
    yield "up", cli("up", "-n", "2", "-t", "p4d.24xlarge", "--reservation", name)
    yield "down", cli("down", "-y")


def _without_warnings(done: Any) -> Any:
    """Require that `doctor` could check everything: it warns about some calls that are denied."""
    assert {one["status"] for one in json.loads(done.stdout)} == {"pass", "note"}, done.stdout
    return done


def change_caller(sim: control.Simulator, cluster: str) -> None:
    """Have the cluster's group allow another address than the caller's, as after a change of networks."""
    ec2 = client_of(sim, "ec2")
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cluster]}]
    (group,) = ec2.describe_security_groups(Filters=where)["SecurityGroups"]
    (rule,) = (one for one in group["IpPermissions"] if one.get("IpRanges"))
    ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[rule])
    ranges = [{**rule["IpRanges"][0], "CidrIp": "198.51.100.77/32"}]
    changed = {**rule, "IpRanges": ranges}
    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[changed])


def _leave_remains(sim: control.Simulator, cluster: str) -> None:
    """Create what an interrupted launch can leave: a volume and a network interface with the cluster's
    tags."""
    ec2 = client_of(sim, "ec2")
    tags = [{"Key": "cloudddp:cluster", "Value": cluster}, {"Key": TAG, "Value": "c-0123456789"}]
    ec2.create_volume(
        AvailabilityZone="us-east-1a", Size=8, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
    )
    ec2.create_network_interface(
        SubnetId=ec2.describe_subnets()["Subnets"][0]["SubnetId"],
        TagSpecifications=[{"ResourceType": "network-interface", "Tags": tags}],
    )


def statements(name: str) -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / name).read_text())["Statement"])


def listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, list) else [value]


def granted(name: str) -> set[str]:
    """Return every action that a policy allows somewhere, wildcards expanded with botocore's models."""
    allowing = [item for item in statements(name) if item["Effect"] == "Allow"]
    patterns = {one for item in allowing for one in listed(item["Action"])}
    services = {one.partition(":")[0] for one in patterns}
    known = {action for service in services for action in operations(service)}
    expanded = {action for action in known for one in patterns if matches(one.lower(), action.lower())}
    return expanded | {one for one in patterns if "*" not in one and "?" not in one}


@functools.cache
def operations(prefix: str) -> frozenset[str]:
    """Return the actions of a service, as botocore knows its operations."""
    names = {"servicequotas": "service-quotas", "elasticfilesystem": "efs"}
    model = botocore.session.get_session().get_service_model(names.get(prefix, prefix))
    return frozenset(f"{prefix}:{name}" for name in model.operation_names)
