"""Extra tags: on everything that `up` creates, from the file and from --tag, and refused before anything is
called."""

from __future__ import annotations

from typing import Any

import pytest

KINDS = {"key-pair", "security-group", "instance", "volume", "network-interface"}


def tags_of(ec2: Any, cluster: str) -> dict[str, list[dict[str, str]]]:
    """Return the tags of each resource of a cluster, by its kind."""
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cluster]}]
    found = {
        "instance": [
            i for r in ec2.describe_instances(Filters=where)["Reservations"] for i in r["Instances"]
        ],
        "security-group": ec2.describe_security_groups(Filters=where)["SecurityGroups"],
        "key-pair": ec2.describe_key_pairs(Filters=where)["KeyPairs"],
        "volume": ec2.describe_volumes(Filters=where)["Volumes"],
        "network-interface": ec2.describe_network_interfaces(Filters=where)["NetworkInterfaces"],
    }
    return {
        kind: [{tag["Key"]: tag["Value"] for tag in one.get("Tags") or one["TagSet"]} for one in resources]
        for kind, resources in found.items()
    }


@pytest.mark.parametrize("spot", [False, True])
def test_extra_tags_are_on_every_resource(cli: Any, ec2: Any, spot: bool) -> None:
    cli.write("cloudddp.toml", "[cluster.tags]\nCostCenter = '42'\nTeam = 'vision'\n")
    extra = {"CostCenter": "43", "Team": "vision", "a b": "R&D = 2 <ü>", "empty": "", "Name": "mine"}
    words = ["--tag", "CostCenter=43", "--tag", "a b=R&D = 2 <ü>", "--tag", "empty=", "--tag", "Name=mine"]
    cli.ok("up", "-n", "2", *words, *(["--spot"] if spot else []))
    found = tags_of(ec2, cli.cluster)
    assert {kind: len(tags) for kind, tags in found.items()} == {
        **dict.fromkeys(KINDS, 2),
        "key-pair": 1,
        "security-group": 1,
    }
    for tags in (one for every in found.values() for one in every):
        assert extra.items() <= tags.items()
        assert "cloudddp:cluster-id" in tags
    if spot:
        where = [{"Name": "tag:CostCenter", "Values": ["43"]}]
        assert len(ec2.describe_spot_instance_requests(Filters=where)["SpotInstanceRequests"]) >= 2


def test_tags_of_a_cluster_do_not_change_what_down_finds(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1", "--tag", "Cloudddp=x", "--tag", "cluster=other")
    cli.ok("down", "-y")
    assert remains().nothing


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["aws:team=x"], "begins with 'aws:', which AWS reserves"),
        (["AWS:Team=x"], "begins with 'aws:', which AWS reserves"),
        (["cloudddp:owner=me"], "begins with 'cloudddp:', which is reserved"),
        (["Cloudddp:Cluster=x"], "begins with 'cloudddp:', which is reserved"),
        (["Team"], "--tag 'Team' has no '='"),
        (["=x"], "tag key '' is not allowed"),
        (["k" * 128 + "=x"], "1 to 127 characters"),
        (["k=" + "v" * 257], "the value of tag 'k' is not allowed"),
        (["k=a\nb"], "the value of tag 'k' is not allowed"),
        (["a\tb=x"], "without control characters"),
        ([f"k{number}=x" for number in range(36)], "36 extra tags are too many"),
    ],
)
def test_invalid_tags_exit_2_before_any_call(cli: Any, faults: Any, tags: list[str], message: str) -> None:
    done = cli("up", *(word for tag in tags for word in ("--tag", tag)))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert faults.calls == []


def test_tags_of_file_and_options_are_counted_together(cli: Any, faults: Any) -> None:
    cli.write("cloudddp.toml", "[cluster.tags]\n" + "".join(f"file{number} = ''\n" for number in range(20)))
    done = cli("up", *(word for number in range(16) for word in ("--tag", f"option{number}=x")))
    assert done.returncode == 2
    assert "36 extra tags are too many" in done.stderr
    assert faults.calls == []


def test_tags_that_are_not_text_are_refused(cli: Any, faults: Any) -> None:
    cli.write("cloudddp.toml", "[cluster.tags]\nCostCenter = 42\n")
    done = cli("up")
    assert done.returncode == 2
    assert "a table of KEY = 'value'" in done.stderr
    assert faults.calls == []


def test_as_many_tags_as_allowed_are_accepted_by_ec2(cli: Any, ec2: Any) -> None:
    words = [word for number in range(35) for word in ("--tag", f"{number:02}{'k' * 125}={'v' * 256}")]
    cli.ok("up", "-n", "1", *words)
    (tags,) = tags_of(ec2, cli.cluster)["instance"]
    assert len(tags) > 35
