"""Extra tags: on everything that `up` creates, and refused before anything is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudddp.cli.main import main
from cloudddp.errors import UsageError

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


def test_extra_tags_are_on_every_resource(cli: Any, ec2: Any, remains: Any) -> None:
    """Requests of spot instances, too. None of them changes what `down` finds."""
    cli.write("cloudddp.toml", "[cluster.tags]\nCostCenter = '42'\nTeam = 'vision'\n")
    extra = {
        "CostCenter": "43",
        "a b": "R&D = 2 <ü>",
        "empty": "",
        "Name": "mine",
        "Cloudddp": "x",
        "cluster": "y",
    }
    words = [word for key, value in extra.items() for word in ("--tag", f"{key}={value}")]
    cli.ok("up", "-n", "2", *words, "--spot")
    found = tags_of(ec2, cli.cluster)
    assert {kind: len(tags) for kind, tags in found.items()} == {
        **dict.fromkeys(KINDS, 2),
        "key-pair": 1,
        "security-group": 1,
    }
    for tags in (one for every in found.values() for one in every):
        assert {**extra, "Team": "vision"}.items() <= tags.items()
        assert "cloudddp:cluster-id" in tags
    where = [{"Name": "tag:CostCenter", "Values": ["43"]}]
    assert len(ec2.describe_spot_instance_requests(Filters=where)["SpotInstanceRequests"]) >= 2
    cli.ok("down", "-y")
    assert remains().nothing


def test_tags_of_file_and_options_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cloudddp.toml"
    path.write_text("[cluster.tags]\n" + "".join(f"file{number} = ''\n" for number in range(20)))
    refused("36 extra tags are too many", [f"option{number}=x" for number in range(16)])
    path.write_text("[cluster.tags]\nCostCenter = 42\n")
    refused("a table of KEY = 'value'", [])


def refused(message: str, tags: list[str]) -> None:
    words = ["up", *(word for tag in tags for word in ("--tag", tag))]
    with pytest.raises(UsageError) as error:
        main.main(words, standalone_mode=False, prog_name="cloudddp")
    assert message in f"{error.value.message} {error.value.hint}"
