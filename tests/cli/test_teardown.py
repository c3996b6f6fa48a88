"""Removal of a cluster from an account: what is terminated and deleted, what is kept, and what the report
says.

`down` is called in this process and the account is the simulator's. Its instances never boot, so most tests
take less than a second; test_down.py has whole clusters. `make mutants` runs this file for each change of
teardown.py and stops at the first failure, so slow tests come last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from support.faults import Rewrite, without_element
from support.harness import TIMEOUT, until
from support.teardown_account import Account, folder_of, ids

from cloudddp.aws.inventory import Resource
from cloudddp.cluster.created_ids import KnownIds
from cloudddp.cluster.prices import Cost
from cloudddp.cluster.teardown import DownReport

# -- what is removed -----------------------------------------------------------------------------------------


def test_everything_with_the_name_is_removed(account: Account) -> None:
    group = account.group()
    nodes = account.launch(2, SecurityGroupIds=[group])
    interface, volume, key = account.interface(), account.volume(), account.key()
    began = datetime.now(UTC) - timedelta(hours=2)
    account.ec2.create_tags(
        Resources=nodes, Tags=[{"Key": "cloudddp:created", "Value": f"{began:%Y-%m-%dT%H:%M:%SZ}"}]
    )
    account.show_as_shutting_down(3)
    report = account.down()
    assert account.listed() == []
    assert sorted(ids(report.terminated)) == sorted(nodes)
    assert ids(report.deleted) == [interface, volume, group, key]
    assert (report.left, report.others, report.reasons) == ((), (), ())
    assert not report.nothing
    assert report.cost.usd == pytest.approx(6.0, abs=0.1)
    assert account.changes() == [
        "TerminateInstances",
        "DeleteNetworkInterface",
        "DeleteVolume",
        "DeleteSecurityGroup",
        "DeleteKeyPair",
    ]
    assert account.progress[0] == "terminating 2 nodes"
    assert "waiting for 2 nodes to terminate" in account.progress
    assert account.progress[-4:] == [
        f"deleting network interface {interface}",
        f"deleting volume {volume}",
        f"deleting security group {group}",
        f"deleting key pair {key}",
    ]


def test_one_resource_is_something_to_remove(account: Account) -> None:
    for create in (account.group, account.elastic_ip, account.placement_group):
        create()
        report = account.down()
        assert not report.nothing
        assert account.listed() == []


def test_nothing_to_remove_changes_nothing(account: Account) -> None:
    """Nor does an instance that had ended: it is not reported as terminated."""
    check_nothing_to_remove(account)
    (node,) = account.launch()
    assert not account.down().nothing
    assert account.progress[0] == "terminating 1 node"
    assert account.state(node) == "terminated"
    account.progress.clear()
    check_nothing_to_remove(account)


def check_nothing_to_remove(account: Account) -> None:
    report = account.down()
    assert report.nothing
    assert report == DownReport((), (), (), (), (), Cost(0))
    assert account.progress == []
    assert account.changes() == []
    assert account.faults.count("DescribeInstances") == 1


def test_instance_that_is_already_shutting_down_is_awaited(account: Account) -> None:
    group = account.group()
    (node,) = account.launch(SecurityGroupIds=[group])
    account.ec2.terminate_instances(InstanceIds=[node])
    account.show_as_shutting_down(3)
    report = account.down()
    assert account.faults.count("DescribeInstances") > 3
    assert "waiting for 1 node to terminate" in account.progress
    assert report.terminated == ()
    assert ids(report.deleted) == [group]
    assert account.changes() == ["DeleteSecurityGroup"]


def test_resources_of_others_are_kept_and_reported(account: Account) -> None:
    mine, theirs, ended = account.launch(3)
    group, key = account.group(), account.key()
    account.ec2.terminate_instances(InstanceIds=[ended])
    until(lambda: account.state(ended) == "terminated")
    report = account.down(mine=lambda one: one.id in (mine, group))
    assert sorted(account.listed()) == sorted([theirs, key])
    assert ids(report.terminated) == [mine]
    assert ids(report.deleted) == [group]
    assert sorted(ids(report.others)) == sorted([theirs, key])
    assert report.left == ()
    account.down()


# -- instances that AWS does not list, does not know, or refuses ---------------------------------------------


def test_known_instance_without_tags_is_terminated(account: Account) -> None:
    (untagged,) = account.launch(tags={})
    (node,) = account.launch()
    report = account.down(known=KnownIds((untagged, node)))
    assert account.state(untagged) in ("shutting-down", "terminated")
    assert report.left == ()
    assert account.progress[0] == "terminating 2 nodes"


def test_refused_instance_is_left_and_others_are_terminated(account: Account) -> None:
    group = account.group()
    kept, other = account.launch(2, SecurityGroupIds=[group])
    account.ec2.modify_instance_attribute(InstanceId=kept, DisableApiTermination={"Value": True})
    report = account.down()
    assert account.state(other) == "terminated"
    assert account.state(kept) == "running"
    assert ids(report.left) == [kept]
    assert ids(report.terminated) == [other]
    assert report.deleted == ()
    assert len(report.reasons) == 1
    assert "OperationNotPermitted" in report.reasons[0]
    assert "DeleteSecurityGroup" not in account.faults.calls
    account.ec2.modify_instance_attribute(InstanceId=kept, DisableApiTermination={"Value": False})
    assert account.down().left == ()


def test_refusal_leaves_unlisted_instances_in_the_report(account: Account) -> None:
    (untagged,) = account.launch(tags={})
    account.faults.fail("TerminateInstances", "UnauthorizedOperation", status=403)
    report = account.down(known=KnownIds((untagged,)))
    assert ids(report.left) == [untagged]
    assert "UnauthorizedOperation" in report.reasons[0]
    account.ec2.terminate_instances(InstanceIds=[untagged])


def test_later_error_is_a_reason_and_what_was_seen_is_left(account: Account) -> None:
    (node,) = account.launch()
    folder = folder_of(account)
    account.faults.fail("TerminateInstances", "ExpiredToken", times=9)
    report = account.down(known=KnownIds(("i-0123456789abcdef0",)))
    assert ids(report.left) == [node, "i-0123456789abcdef0"]
    assert report.terminated == ()
    assert "ExpiredToken" in report.reasons[0]
    assert folder.private_key.exists()
    account.faults.clear()
    account.down()


def test_failed_check_after_the_removal_is_reported(account: Account) -> None:
    group = account.group()
    account.launch()
    folder = folder_of(account)
    account.faults.fail("DescribeSecurityGroups", "UnauthorizedOperation", status=403)
    report = account.down()
    assert not report.deleted
    assert "UnauthorizedOperation" in report.reasons[0]
    assert folder.private_key.exists()
    assert account.listed() == [group]
    account.down()


# -- resources that cannot be deleted at once ----------------------------------------------------------------


def test_permanent_error_does_not_keep_other_resources(account: Account) -> None:
    volume, group, key = account.volume(), account.group(), account.key()
    account.faults.fail("DeleteVolume", "UnauthorizedOperation", times=9, status=403)
    report = account.down()
    assert account.faults.count("DeleteVolume") == 1  # waiting would not help
    assert account.listed() == [key, volume]
    assert ids(report.deleted) == [group]
    assert sorted(ids(report.left)) == sorted([volume, key])
    assert len(report.reasons) == 1
    assert "UnauthorizedOperation" in report.reasons[0]
    account.faults.clear()
    account.down()


def test_instance_started_during_the_removal_is_terminated(account: Account) -> None:
    group = account.group()
    reached, release = account.faults.hold("DescribeSecurityGroups")
    reports: list[DownReport] = []
    removal = threading.Thread(target=lambda: reports.append(account.down()))
    removal.start()
    assert reached.wait(TIMEOUT)
    (node,) = account.launch(SecurityGroupIds=[group])
    release.set()
    removal.join(TIMEOUT)
    assert account.state(node) == "terminated"
    assert account.listed() == []
    (report,) = reports
    assert ids(report.terminated) == [node]
    assert ids(report.deleted) == [group]
    assert (report.left, report.reasons) == ((), ())


# -- tests that take seconds, since `down` waits -------------------------------------------------------------


def test_volume_that_disappears_late_is_deleted(account: Account, limits: Callable[..., None]) -> None:
    """It is listed once more after its deletion: eventual consistency."""
    limits(scale=1)
    volume = account.volume()
    shown: list[bytes] = []

    def one_late(body: bytes) -> bytes:
        shown.append(body)
        return shown[0] if len(shown) == 2 else body

    account.faults.rewrite("DescribeVolumes", one_late)
    report = account.down()
    assert (ids(report.deleted), report.left, report.reasons) == ([volume], (), ())


@pytest.mark.parametrize("refused", [False, True], ids=["terminated", "refused"])
def test_group_that_is_listed_late_is_deleted(
    account: Account, limits: Callable[..., None], refused: bool
) -> None:
    """What an `up` creates at the same time appears after the first check."""
    limits(scale=1)
    group = account.group()
    (node,) = account.launch(tags={} if refused else None)
    if refused:
        account.faults.fail("TerminateInstances", "OperationNotPermitted")
    account.faults.rewrite("DescribeSecurityGroups", hidden_at_first(account))
    report = account.down(known=KnownIds((node,)))
    assert account.listed() == []
    assert ids(report.deleted) == [group]
    assert ids(report.left) == ([node] if refused else [])
    account.ec2.terminate_instances(InstanceIds=[node])


def hidden_at_first(account: Account) -> Rewrite:
    empty = without_element("securityGroupInfo")
    return lambda body: empty(body) if account.faults.count("DescribeSecurityGroups") == 1 else body


def test_deleted_volume_that_stays_listed_is_left(account: Account, limits: Callable[..., None]) -> None:
    limits(still_listed=2.0)
    volume, group, folder = account.volume(), account.group(), folder_of(account)
    shown: list[bytes] = []

    def repeat_the_first(body: bytes) -> bytes:
        shown.append(body)
        return shown[0]

    account.faults.rewrite("DescribeVolumes", repeat_the_first)
    report = account.down()
    assert account.listed() == []
    assert ids(report.left) == [volume]
    assert ids(report.deleted) == [group]
    assert report.reasons == ()
    assert len(shown) > 2
    assert folder.private_key.exists()
    assert account.progress.count(f"deleting volume {volume}") == 1
    assert "waiting until they are no longer in use" not in account.progress


def test_known_instance_that_aws_does_not_find_is_left(account: Account, limits: Callable[..., None]) -> None:
    limits()
    group, key = account.group(), account.key()
    (node,) = account.launch()
    lost = "i-0123456789abcdef0"
    report = account.down(known=KnownIds((lost,)))
    assert [(one.id, one.kind, one.detail) for one in report.left if isinstance(one, Resource)] == [
        (lost, "instance", "(state unknown)")
    ]
    assert ids(report.left) == [lost]
    assert ids(report.terminated) == [node]
    assert ids(report.deleted) == [group, key]
    assert not report.nothing
    assert account.listed() == []


def test_group_in_use_is_deleted_once_it_is_released(account: Account, limits: Callable[..., None]) -> None:
    """That takes longer than what is deleted stays listed: 0.4 s, with limits of 30 s and 0.3 s."""
    limits(scale=0.1, still_listed=0.3)
    group, key = account.group(), account.key()
    account.faults.fail("DeleteSecurityGroup", "DependencyViolation", times=2)
    report = account.down()
    assert account.listed() == []
    assert (report.left, report.reasons) == ((), ())
    assert account.changes() == ["DeleteSecurityGroup", "DeleteKeyPair"]
    assert account.faults.count("DeleteSecurityGroup") == 3
    assert account.progress == [
        f"deleting security group {group}",
        *["waiting until they are no longer in use"] * 2,
        f"deleting key pair {key}",
    ]


def test_group_that_stays_in_use_is_left_and_keeps_the_name(
    account: Account, limits: Callable[..., None]
) -> None:
    limits(in_use=3.0)
    group, key = account.group(), account.key()
    subnet = account.ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    made = account.ec2.create_network_interface(SubnetId=subnet, Groups=[group], Description="of another")
    interface = made["NetworkInterface"]["NetworkInterfaceId"]
    account.faults.fail("DeleteSecurityGroup", "DependencyViolation", times=99)
    report = account.down()
    assert f"{group} is used by network interface {interface} (of another)" in report.reasons[0]
    account.ec2.delete_network_interface(NetworkInterfaceId=interface)
    assert sorted(ids(report.left)) == sorted([group, key])
    assert account.faults.count("DeleteSecurityGroup") >= 2
    assert account.faults.count("DeleteKeyPair") == 0
    assert report.deleted == ()
    assert len(report.reasons) == 1
    assert "DependencyViolation" in report.reasons[0]
    account.faults.clear()
    account.down()
