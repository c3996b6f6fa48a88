"""The conditions of the simulator: what a body changes, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cloudddp.simulator.conditions.model import Conditions
from cloudddp.simulator.conditions.reading import InvalidCondition, Names, merge

ROLE = "arn:aws:iam::123456789012:role/trainer"
BLOCK = "cr-0123456789abcdef0"
NAMES = Names(
    zones=frozenset({"us-east-1a", "us-east-1b"}),
    types=frozenset({"g5.xlarge", "p4d.24xlarge", "p5.48xlarge"}),
    actions=frozenset({"RunInstances", "DescribeVpcs"}),
    subnets=frozenset({"subnet-0123456789abcdef0"}),
    vpcs=frozenset({"vpc-0123456789abcdef0"}),
    regions=frozenset({"us-east-1", "af-south-1"}),
)


def test_bodies_are_merged_and_entries_removed_one_by_one() -> None:
    shown = Conditions()
    for body, expected in (
        ({"throttle": {"RunInstances": 2}, "quota": {"on-demand-g": 8}}, {}),
        (
            {"throttle": {"DescribeVpcs": 1}, "capacity": {"us-east-1a": {"g5.xlarge": 0}}},
            {
                "capacity": {"us-east-1a": {"g5.xlarge": 0}},
                "quota": {"on-demand-g": 8},
                "throttle": {"RunInstances": 2, "DescribeVpcs": 1},
            },
        ),
        (
            {"throttle": {"RunInstances": None}, "capacity": {"us-east-1a": None}, "quota": {}},
            {"capacity": {}, "quota": {"on-demand-g": 8}, "throttle": {"DescribeVpcs": 1}},
        ),
        ({"clear": True, "link": {"latency": 0.1, "mbit": 50}}, {"quota": {}, "throttle": {}}),
        ({"link": {"loss": 1, "mbit": None}}, {"link": {"latency": 0.1, "loss": 1}}),
        ({"link": None}, {"link": {}}),
        (
            {
                "request_rate": {"RunInstances": {"bucket": 2, "refill": 1}},
                "regions": {"af-south-1": "not-opted-in"},
            },
            {
                "request_rate": {"RunInstances": {"bucket": 2, "refill": 1.0}},
                "regions": {"af-south-1": "not-opted-in"},
            },
        ),
        (
            {"regions": {"af-south-1": None}, "lingering": {"interfaces": 60}},
            {"regions": {}, "lingering": {"interfaces": 60}},
        ),
    ):
        shown = merge(shown, body, NAMES)
        assert {key: shown.to_json()[key] for key in expected} == expected


def block(**more: Any) -> dict[str, Any]:
    entry = {
        "zone": "us-east-1a",
        "type": "g5.xlarge",
        "count": 1,
        "start": "2026-01-01",
        "end": "2027-01-01",
    }
    return {"blocks": {BLOCK: {**entry, "end": "2027-01-01", **more}}}


LATENCY = "latency: expected seconds of a round trip, from 0 to 10 (0.05 is 50 ms), not"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "conditions must be a JSON object, not null"),
        ([], "conditions must be a JSON object, not []"),
        ({"capacities": {}}, "unknown condition 'capacities'; known: capacity"),
        ({"capacity": {"us-east-1z": {"g5.xlarge": 0}}}, "unknown zone 'us-east-1z'; known: us-east-1"),
        ({"capacity": {"us-east-1a": {"g5.xlarge": -1}}}, "capacity: g5.xlarge: expected"),
        ({"capacity": 3}, "expected an object with a key per zone, not 3"),
        ({"throttle": {"RunInstance": 1}}, "unknown action 'RunInstance'; known: RunInstances"),
        ({"throttle": {"RunInstances": 0}}, "throttle: RunInstances: expected"),
        ({"quota": {"on-demand-q": 1}}, "unknown quota 'on-demand-q'; known: on-demand-"),
        ({"free_addresses": {"subnet-0": 1}}, "known: subnet-"),
        ({"latency": {"*": -1}}, "latency: *: expected"),
        ({"boot": {"ssh_second": 1}}, "known: ssh_seconds"),
        ({"boot": {"failed_gpus": 17}}, "boot: failed_gpus: expected"),
        ({"reject": {"RunInstances": {"message": "no code"}}}, "reject: RunInstances: expected"),
        ({"reject": {"RunInstances": {"code": "X", "status": 200}}}, "reject: RunInstances: "),
        ({"link": {"latency": -1}}, f"{LATENCY} -1"),
        ({"link": {"latency": "50ms"}}, f"{LATENCY} "),
        ({"link": {"mbit": 0}}, "mbit: expected Mbit/s above 0"),
        ({"link": {"loss": 101}}, "loss: expected percent from 0 to 100, not 101"),
        ({"link": {"delay": 0.1}}, "unknown setting of a link 'delay'; known: latency, loss, mbit"),
        ({"vpn": {"vpc-1": "10.8.0.10"}}, "known: vpc-0123456789abcdef0"),
        ({"blocks": {"cr-zz": {}}}, "'cr-zz' is not the id of a capacity reservation"),
        ({"blocks": {BLOCK: {"zone": "us-east-1a"}}}, 'expected "zone", "type", "count", "start" and "end"'),
        (block(start="soon"), "expected a time such as 2026-11-20T11:30:00Z"),
        ({"regions": {"af-south-1": "opted-in"}}, 'regions: af-south-1: expected "not-opted-in"'),
        ({"request_rate": {"RunInstances": 2}}, 'expected {"bucket": TOKENS, "refill": TOKENS PER SECOND}'),
        ({"request_rate": {"RunInstances": {"bucket": 1, "refill": 0}}}, "tokens per second above 0"),
        ({"lingering": {"volumes": 1}}, "unknown kind 'volumes'; known: interfaces"),
        ({"roles": {"trainer": {}}}, "'trainer'; known: arn:aws:iam::123456789012:role/NAME"),
        ({"roles": {ROLE: {"codes": ["12"]}}}, "codes of 6 digits"),
        ({"roles": {ROLE: {"seconds": -1}}}, "from 0 to 43200"),
        ({"roles": {ROLE: {"refuse": 1}}}, "true or false"),
        ({"clock": {"ahead": 1.5}}, "whole seconds"),
    ],
)
def test_invalid_body_is_refused(body: Any, message: str) -> None:
    with pytest.raises(InvalidCondition) as error:
        merge(Conditions(), body, NAMES)
    assert message in str(error.value)
    assert "; for example {" in str(error.value) or "known: " in str(error.value)


def test_conditions_that_the_manual_shows_are_accepted() -> None:
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")  # commands.md has the help
    shown = [body for page in pages for body in re.findall(r"sim conditions '(\{.*\})'", page.read_text())]
    assert len(shown) > 4
    for body in shown:
        if "..." not in body:
            merge(Conditions(), json.loads(body), NAMES)
