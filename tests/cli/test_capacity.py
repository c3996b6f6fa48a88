"""`capacity`: what AWS has and sells, in each region; it buys nothing."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

P5 = ("-t", "p5.48xlarge", "-n", "2")


def documents(cli: Any, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cli.ok("capacity", *words, "--json"))
    return found


def test_each_region_is_shown(cli: Any, conditions: Any) -> None:
    conditions(prices={"p5.48xlarge": 55.0}, quota={"on-demand-p": 400, "spot-p5": 192})
    words = (*P5, "--days", "2", "--regions", "us-east-1,us-west-2")
    east, west = documents(cli, *words)
    assert (east["region"], west["region"]) == ("us-east-1", "us-west-2")
    assert (east["type"], east["nodes"], east["usd_per_hour"], east["problems"]) == (
        "p5.48xlarge",
        2,
        55.0,
        {},
    )
    quotas = [(one["market"], one["vcpus"]) for one in east["quotas"]]
    assert quotas == [("on demand", 400), ("spot", 192)]
    assert east["vcpus_needed"] == 384
    for zone in east["zones"]:
        assert zone["zone"].startswith("us-east-1")
        assert zone["spot_usd_per_hour"] > 0
        assert 1 <= zone["spot_score"] <= 10
    for block in east["blocks"]:
        assert block["nodes"] == 2
        assert block["usd"] == pytest.approx(block["usd_per_hour"] * 2 * 48, rel=0.001)
    text = cli.ok("capacity", *words)
    assert max(map(len, text.splitlines())) <= 80, text
    assert "p5.48xlarge in us-east-1\n  on demand  $55.00 per node-hour" in text
    assert "spot: 384 vCPUs needed, 0 of 192 in use: too few" in text
    assert re.search(r"^  us-east-1\w  \$\d+\.\d\d  +\d+$", text, re.MULTILINE)
    assert text.count("purchase-capacity-block") == 2


def test_printed_command_buys_what_botocore_knows(cli: Any, faults: Any) -> None:
    """Its options are parameters of PurchaseCapacityBlock, and cloudddp itself does not call it."""
    block = documents(cli, *P5)[0]["blocks"][0]
    words = shlex.split(block["purchase"])
    assert words[:3] == ["aws", "ec2", "purchase-capacity-block"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given.pop("--region") == "us-east-1"
    params = {
        "".join(part.capitalize() for part in key[2:].split("-")): value for key, value in given.items()
    }
    shape = (
        botocore.session.get_session()
        .get_service_model("ec2")
        .operation_model("PurchaseCapacityBlock")
        .input_shape
    )
    assert not ParamValidator().validate(params, shape).has_errors()
    assert params["CapacityBlockOfferingId"] == block["id"]
    assert faults.count("PurchaseCapacityBlock") == 0


def test_type_without_blocks_is_reported_without_a_call(cli: Any, faults: Any) -> None:
    text = cli.ok("capacity", "-t", "g5.xlarge", "-n", "2")
    assert "no capacity block of this type is for sale" in text
    assert "purchase-capacity-block" not in text
    assert faults.count("DescribeCapacityBlockOfferings") == 0


def test_what_is_denied_or_missing_does_not_hide_the_rest(cli: Any, conditions: Any) -> None:
    denied = {"code": "UnauthorizedOperation", "status": 403, "calls": 99}
    conditions(
        reject={
            "GetSpotPlacementScores": denied,
            "DescribeCapacityBlockOfferings": denied,
            "GetServiceQuota": {"code": "AccessDeniedException", "status": 400, "calls": 99},
        }
    )
    text = cli.ok("capacity", *P5, "--regions", "us-east-1,eu-west-3")
    assert "spot score: AWS denied ec2:GetSpotPlacementScores in us-east-1" in text
    assert "blocks: AWS denied ec2:DescribeCapacityBlockOfferings in us-east-1" in text
    assert "quota on demand: AWS denied servicequotas:GetServiceQuota in us-east-1" in text
    assert "p5.48xlarge in eu-west-3\n  type: eu-west-3 does not offer p5.48xlarge\n" in text
    assert re.search(r"^  us-east-1\w  \$\d+\.\d\d +-$", text, re.MULTILINE)
    alone = cli.fails(1, "capacity", *P5, "--region", "eu-west-3")
    assert "nothing is known of the type in these regions" in alone
