"""Two commands at once on one name: two `up`s make one cluster, `up` with `down` leaves a whole cluster or none."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import TIMEOUT, CommandLine, Remains, wait_for
from test_careful import Terminal

# Seconds between the two commands, from one laptop and from two.
LAPTOPS = ["one", "two"]
OFFSETS = [0.0, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0]


@pytest.fixture
def other(cli: CommandLine, tmp_path: Path) -> CommandLine:
    """The same user's second laptop: another state folder, the same account."""
    return CommandLine(
        cli.cwd, cli.cluster, {**cli.env, "CLOUDDDP_HOME": str(tmp_path / "second")}, cli.started
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


def cluster_ids(ec2: Any, name: str) -> set[str]:
    """The ids that everything of that name carries, terminated instances aside."""
    where = [{"Name": "tag:cloudddp:cluster", "Values": [name]}]
    found = [
        *(
            i
            for r in ec2.describe_instances(Filters=where)["Reservations"]
            for i in r["Instances"]
            if i["State"]["Name"] != "terminated"
        ),
        *ec2.describe_security_groups(Filters=where)["SecurityGroups"],
        *ec2.describe_key_pairs(Filters=where)["KeyPairs"],
    ]
    return {tag["Value"] for one in found for tag in one["Tags"] if tag["Key"] == "cloudddp:cluster-id"}


def says_who_and_since_when(text: str, cluster_id: str) -> bool:
    """The sentence of who came second; a cluster that is ready already is told of in the answer's first line."""
    taken = f"cluster {cluster_id} of user/moto, since 20" in text
    return taken or re.search(r"was up already, made by user/moto on 20\d\d-", text) is not None


def refused_after_its_question(
    cli: CommandLine, winner: CommandLine, ec2: Any, remains: Callable[[], Remains], *flags: str
) -> tuple[str, str, Remains]:
    """Let an `up` wait at its question until `winner` has made as many nodes, then answer yes: it must fail.

    Returns what it showed, the winner's cluster id, and what existed before the answer.
    """
    waiting = Terminal(cli, "up", *flags)
    try:
        waiting.read_until(b"Start these nodes? [y/N]")
        winner.ok("up", "-y", *flags[:2])
        before = remains()
        (cluster_id,) = cluster_ids(ec2, cli.cluster)
        os.write(waiting.ours, b"y\n")
        with contextlib.suppress(OSError):  # the terminal ends with the command
            waiting.read_until(b"-> ")
        assert waiting.process.wait(TIMEOUT) == 1
    finally:
        waiting.process.kill()
        waiting.process.wait()
    return " ".join(waiting.seen.decode().split()), cluster_id, before


# -- two `up`s ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("laptops", LAPTOPS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_two_ups_of_one_name_make_one_cluster(
    cli: CommandLine, other: CommandLine, ec2: Any, remains: Any, offset: float, laptops: str
) -> None:
    first = cli.start("up", "-y", "-n", "2")
    time.sleep(offset)
    second = (cli if laptops == "one" else other).start("up", "-y", "-n", "2")
    ends = [finish(first), finish(second)]
    assert all(code in (0, 1) for code, _, _ in ends), ends
    assert any(code == 0 and "is ready" in out for code, out, _ in ends), ends
    (cluster_id,) = cluster_ids(ec2, cli.cluster)
    found = remains()
    assert len(found.instances) == 2
    assert (len(found.groups), len(found.keys)) == (1, 1)
    late = [out + err for _, out, err in ends if "is ready" not in out]
    assert len(late) == 1
    assert says_who_and_since_when(late[0], cluster_id), late[0]
    kept = [p.parent.name for p in Path(cli.env["CLOUDDDP_HOME"]).glob("clusters/*/id_ed25519")]
    kept += [p.parent.name for p in Path(other.env["CLOUDDDP_HOME"]).glob("clusters/*/id_ed25519")]
    assert kept.count(cluster_id) == 1


@pytest.mark.parametrize("laptops", LAPTOPS)
def test_an_up_that_waits_at_its_question_while_another_finishes_makes_nothing(
    cli: CommandLine, other: CommandLine, ec2: Any, remains: Any, laptops: str
) -> None:
    del cli.env["CLOUDDDP_YES"]
    winner = cli if laptops == "one" else other
    said, cluster_id, before = refused_after_its_question(cli, winner, ec2, remains, "-n", "2")
    assert says_who_and_since_when(said, cluster_id), said
    assert "nothing was made" in said
    assert remains() == before


def test_a_name_is_reserved_across_vpcs(cli: CommandLine, other: CommandLine, ec2: Any, remains: Any) -> None:
    """A security group's name is unique in one VPC only; the reservation must hold in another one, too."""
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.0.0/20", AvailabilityZone="us-east-1a")
    del cli.env["CLOUDDDP_YES"]
    flags = ("-n", "1", "--subnet", subnet["Subnet"]["SubnetId"])
    try:
        said, cluster_id, _ = refused_after_its_question(cli, other, ec2, remains, *flags)
    finally:
        ec2.delete_subnet(SubnetId=subnet["Subnet"]["SubnetId"])
        ec2.delete_vpc(VpcId=vpc)
    assert says_who_and_since_when(said, cluster_id)
    assert len(remains().instances) == 1
    other.ok("down", "-y")


# -- kept over kills, released by down -----------------------------------------------------------------------


@pytest.mark.parametrize("action", ["ImportKeyPair", "CreateSecurityGroup", "RunInstances"])
def test_an_up_after_one_that_was_killed_makes_one_whole_cluster(
    cli: CommandLine, faults: Any, ec2: Any, remains: Any, action: str
) -> None:
    came, go = faults.hold(action)
    killed = cli.start("up", "-y", "-n", "2")
    assert came.wait(60)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=TIMEOUT)
    go.set()
    assert remains().keys
    cli.ok("up", "-y", "-n", "2")
    found = remains()
    assert len(found.instances) == 2
    assert (len(found.groups), len(found.keys)) == (1, 1)
    assert len(cluster_ids(ec2, cli.cluster)) == 1


def test_what_an_up_elsewhere_holds_is_not_taken_over(
    cli: CommandLine, other: CommandLine, faults: Any, ec2: Any, remains: Any
) -> None:
    """Of another computer nobody can tell whether its `up` was killed or still works."""
    came, go = faults.hold("CreateSecurityGroup")
    killed = cli.start("up", "-y", "-n", "1")
    assert came.wait(60)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=TIMEOUT)
    go.set()
    (cluster_id,) = cluster_ids(ec2, cli.cluster)
    done = other("up", "-y", "-n", "1")
    assert done.returncode == 1
    assert says_who_and_since_when(done.stderr, cluster_id), done.stderr
    assert "cloudddp down" in done.stderr
    assert not remains().instances
    other.ok("down", "-y")
    assert remains().nothing
    assert "is ready" in other.ok("up", "-y", "-n", "1")
    other.ok("down", "-y")


@pytest.mark.parametrize("laptops", LAPTOPS)
def test_a_name_is_free_again_when_its_nodes_have_reached_their_deadline(
    cli: CommandLine, other: CommandLine, ec2: Any, remains: Any, laptops: str
) -> None:
    (cli if laptops == "one" else other).ok("up", "-y", "-n", "1")
    before = cluster_ids(ec2, cli.cluster)
    ec2.terminate_instances(InstanceIds=remains().instances)
    wait_for(lambda: not remains().instances, "the node has ended")
    if laptops == "two":  # where only the tag says that nobody can be using it any more
        assert cli("up", "-y", "-n", "1").returncode == 1
        (key,) = ec2.describe_key_pairs(KeyNames=[f"cloudddp-{cli.cluster}"])["KeyPairs"]
        past = [{"Key": "cloudddp:expires", "Value": "2026-01-01T00:00:00Z"}]
        ec2.create_tags(Resources=[key["KeyPairId"]], Tags=past)
    assert "is ready" in cli.ok("up", "-y", "-n", "1")
    assert not cluster_ids(ec2, cli.cluster) & before


def test_a_key_pair_that_somebody_made_by_hand_is_named_and_left_alone(cli: CommandLine, ec2: Any) -> None:
    made = ec2.create_key_pair(KeyName=f"cloudddp-{cli.cluster}")["KeyPairId"]
    try:
        done = cli("up", "-y", "-n", "1")
        assert done.returncode == 1
        assert f"is taken in us-east-1 by key pair {made}" in done.stderr
        assert ec2.describe_key_pairs(KeyNames=[f"cloudddp-{cli.cluster}"])["KeyPairs"]
    finally:
        ec2.delete_key_pair(KeyPairId=made)


def test_a_reservation_whose_answer_is_lost_is_our_own(cli: CommandLine, faults: Any, remains: Any) -> None:
    """botocore repeats the call: a Duplicate, whose tag is this cluster's id."""
    faults.lose_answer("ImportKeyPair")
    assert "is ready" in cli.ok("up", "-y", "-n", "1")
    assert faults.count("ImportKeyPair") == 2
    assert len(remains().keys) == 1


def test_down_deletes_the_reservation_last(cli: CommandLine, faults: Any) -> None:
    cli.ok("up", "-y", "-n", "1")
    faults.calls.clear()
    cli.ok("down", "-y")
    deletes = [call for call in faults.calls if call.startswith(("Delete", "Terminate"))]
    assert deletes == ["TerminateInstances", "DeleteSecurityGroup", "DeleteKeyPair"]


# -- `up` with `down` --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("laptops", LAPTOPS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_up_with_down_leaves_a_whole_cluster_or_none_and_both_say_which(
    cli: CommandLine, other: CommandLine, ec2: Any, remains: Any, offset: float, laptops: str
) -> None:
    up = cli.start("up", "-y", "-n", "2")
    time.sleep(offset)
    down = (cli if laptops == "one" else other).start("down", "-y")
    made, removed = finish(up), finish(down)
    check_whole_or_none(cli, made, removed, remains())


ACTIONS = [
    "ImportKeyPair",
    "CreateSecurityGroup",
    "AuthorizeSecurityGroupIngress",
    "AuthorizeSecurityGroupEgress",
    "RunInstances",
]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_whole_down_between_two_calls_of_up_leaves_nothing(
    cli: CommandLine, other: CommandLine, faults: Any, remains: Any, action: str
) -> None:
    """`up` stands still after the call has had its effect; `down` begins and ends meanwhile."""
    other.env["AWS_ENDPOINT_URL"] = faults.upstream
    came, go = faults.hold(action)
    up = cli.start("up", "-y", "-n", "2")
    assert came.wait(60)
    removed = finish(other.start("down", "-y"))
    go.set()
    made = finish(up)
    assert made[0] == 1, made
    assert "taken down by another command" in made[2]
    check_whole_or_none(cli, made, removed, remains())
    assert remains().nothing


def test_nodes_that_start_while_down_is_at_work_are_ended_by_it(
    cli: CommandLine, other: CommandLine, faults: Any, remains: Any
) -> None:
    """`down` has looked at the instances, and found none, when RunInstances has its effect."""
    faults.calls.clear()
    came, go = faults.hold("CreateSecurityGroup")
    up = cli.start("up", "-y", "-n", "2")
    assert came.wait(60)
    with slowed(faults, other, "DescribeSecurityGroups") as (looked, look_on):
        down = other.start("down", "-y")
        assert looked.wait(60)
        go.set()
        wait_for(lambda: remains().instances, "RunInstances")
        look_on.set()
        removed = finish(down)
    made = finish(up)
    check_whole_or_none(cli, made, removed, remains())


@contextlib.contextmanager
def slowed(faults: Any, other: CommandLine, action: str) -> Any:
    """An endpoint of its own for the other laptop, which holds one action's answer back."""
    with type(faults)(faults.upstream) as endpoint:
        other.env["AWS_ENDPOINT_URL"] = endpoint.url
        yield endpoint.hold(action)


def check_whole_or_none(
    cli: CommandLine, made: tuple[int, str, str], removed: tuple[int, str, str], found: Any
) -> None:
    """`made` and `removed`: exit code, stdout, stderr of `up` and of `down`."""
    (up, ready, why), (down, told, _) = made, removed
    assert down == 0, removed
    if found.instances:
        assert len(found.instances) == 2
        assert (len(found.groups), len(found.keys)) == (1, 1)
        assert up == 0, made
        assert "is ready" in ready
        (shown,) = json.loads(cli.ok("status", "--json"))
        assert len(shown["nodes"]) == 2
        assert "nothing to do" in told
        return
    assert found.nothing
    if up == 0:  # it was ready before `down` began with it
        assert "2 nodes ended" in told
    else:
        assert up == 1, made
        assert "taken down by another command while it was being made; nothing of it is left" in why
        assert "nothing is left" in told or "nothing to do" in told
