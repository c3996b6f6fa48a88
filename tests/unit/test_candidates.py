"""Several instance types, a GPU in place of types, and two markets: what is tried, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cloudddp.aws.client import AWS
from cloudddp.cli.commands.clusters import up
from cloudddp.cli.commands.jobs import run
from cloudddp.cli.lazy_commands import SettingOption
from cloudddp.cluster import offers, prices
from cloudddp.config import gpus, settings
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.settings import Layer
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.simulator.aws import CONDITIONS, rehearse
from cloudddp.simulator.ec2 import catalog


def cluster(*layers: dict[str, Any], textual: bool = False) -> ClusterSpec:
    """The settings of layers, the one with the highest precedence first."""
    found = [Layer(f"layer {at}", {"cluster": layer}, textual=textual) for at, layer in enumerate(layers)]
    return settings.resolve(found).cluster


@pytest.mark.parametrize(
    ("wanted", "types"),
    [
        ("H100:8", ["p5.48xlarge"]),
        ("h100", ["p5.4xlarge", "p5.48xlarge"]),
        ("A100-80GB:8", ["p4de.24xlarge"]),
        ("A10G:4", ["g5.12xlarge", "g5.24xlarge"]),
        ("V100:8", ["p3.16xlarge", "p3dn.24xlarge"]),
        ("H100:3", []),
        ("P100", []),
    ],
)
def test_types_of_a_gpu(wanted: str, types: list[str]) -> None:
    assert list(gpus.types(wanted)) == types
    assert (gpus.problem(wanted) is None) == bool(types)


def test_table_of_gpus_is_that_of_ec2_and_has_every_type_with_a_price() -> None:
    """EC2's own descriptions, from moto's copy, which has no P3 but p3dn any more."""
    known = {name: (gpu, count) for gpu, found in gpus.table().items() for name, count in found.items()}
    for name, (gpu, count) in known.items():
        if name in catalog.types():
            listed = catalog.gpus(name)
            model = listed[0][0].removeprefix("NVIDIA ").replace(" ", "-").replace("PRO-Server", "PRO")
            assert len(listed) == count, name
            assert gpu.removesuffix("-80GB") == model, name
            assert gpu.endswith("-80GB") == (model == "A100" and listed[0][1] > 50_000), name
    table = json.loads(prices.TABLE.read_bytes())["regions"]
    assert {name for region in table.values() for name in region["types"]} <= set(known)
    assert max(len(found) for found in gpus.table().values()) <= 10  # types that a cluster may name


@pytest.mark.parametrize(
    ("value", "textual"),
    [
        ("p5.48xlarge,g5.xlarge,p5.48xlarge", True),
        ("p5.48xlarge,g5.xlarge", False),
        (["p5.48xlarge", "g5.xlarge"], False),
    ],
)
def test_types_are_a_list_or_a_text_with_commas(value: Any, textual: bool) -> None:
    found = cluster({"instance_type": value}, textual=textual)
    assert (found.types, found.title) == (("p5.48xlarge", "g5.xlarge"), "2 x p5.48xlarge or g5.xlarge")


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        (
            {"instance_type": "X9000"},
            "instance_type: no instance type has a GPU X9000",
            "g5.xlarge, or T4, V100",
        ),
        ({"instance_type": "g5xlarge"}, "no instance type is called g5xlarge", "did you mean g5.xlarge?"),
        ({"instance_type": "A10:1"}, "no instance type has a GPU A10", "did you mean A10G or A100?"),
        ({"instance_type": "H100:3"}, "no instance type has 3 x H100", "available: H100:1, H100:8"),
        ({"instance_type": []}, "cluster.instance_type = \\[\\] is not allowed", "up to 10"),
        ({"instance_type": [f"g5.{n}xlarge" for n in range(11)]}, "not allowed", "up to 10"),
        ({"spot": "maybe"}, "cluster.spot = 'maybe' is not allowed", "true, false or 'prefer'"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        cluster(values)
    assert hint in str(caught.value.hint)


def test_gpu_and_preferred_spot_on_the_command_line() -> None:
    params = up.make_context("up", ["--gpu", "H100:8", "--spot", "prefer"]).params
    flags = [one.flag(params[one.name]) for one in up.params if isinstance(one, SettingOption) and one.name]
    spec = settings.resolve([settings.from_flags(one for one in flags if one is not None)]).cluster
    assert (spec.types, spec.spot) == (("p5.48xlarge",), "prefer")


@pytest.mark.parametrize("script", ["prefer.py", "train.py", "pre"])
def test_script_after_spot_is_no_preference(script: str) -> None:
    params = run.make_context("run", ["--spot", script]).params
    assert (params["spot"], params["script"]) == (True, script)


A, B = "p4d.24xlarge", "g5.12xlarge"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"instance_type": A}, [(A, False)]),
        ({"instance_type": A, "spot": True}, [(A, True)]),
        ({"instance_type": A, "spot": "prefer"}, [(A, True), (A, False)]),
        ({"instance_type": f"{A},{B}"}, [(A, False), (B, False)]),
        ({"instance_type": f"{A},{B}", "spot": "prefer"}, [(A, True), (A, False), (B, True), (B, False)]),
    ],
)
def test_candidates_are_in_the_order_of_the_list(values: dict[str, Any], expected: Any) -> None:
    spec = ClusterSpec(**values)
    assert [(one.instance_type, one.spot) for one in spec.candidates] == expected


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AWS]]:
    """Two regions of moto in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CLOUDDDP_HOME", str(tmp_path_factory.mktemp("home")))
        with rehearse("nodes"):
            yield [AWS(region="us-east-1"), AWS(region="us-west-2")]


@pytest.fixture
def account(regions: list[AWS]) -> Iterator[list[AWS]]:
    """The regions, with prices."""
    spot = {"us-east-1c": {A: 4.0}, "us-east-1a": {A: 6.0}}
    CONDITIONS.update({"prices": {A: 20.0, B: 5.0, "g5g.xlarge": 1.0}, "spot_prices": spot})
    yield regions
    CONDITIONS.update({"clear": True})


def resolved(clouds: list[AWS], **values: Any) -> tuple[list[offers.Offer], list[Any]]:
    spec = replace(ClusterSpec(), zones=(), **values)
    return offers.resolve(clouds, spec, lambda *_: ("203.0.113.7/32",))


def test_offers_are_in_the_order_of_the_list_and_then_of_the_regions(account: list[AWS]) -> None:
    found, excluded = resolved(account, instance_type=f"{A},{B}")
    expected = [(f"{name} on demand", region) for name in (A, B) for region in ("us-east-1", "us-west-2")]
    assert ([(one.label, one.aws.region) for one in found], excluded) == (expected, [])
    launches = [one.plan(one.spec, offers.new_identity()[0]).launches[0] for one in found]
    assert [one.request.params["InstanceType"] for one in launches] == [A, A, B, B]


def test_types_of_a_gpu_begin_with_the_cheapest_offer(account: list[AWS]) -> None:
    CONDITIONS.update({"prices": {"g5.12xlarge": 9.0, "g5.24xlarge": 5.0}})
    found, _ = resolved(account[:1], instance_type="A10G:4", spot="prefer")
    usd = [one.price.spot[0] if one.price.spot else one.price.node_hour for one in found]
    assert usd == sorted(usd)
    on_demand = [one.label for one in found if not one.spec.spot]
    assert (on_demand, len(found)) == (["g5.24xlarge on demand", "g5.12xlarge on demand"], 4)


def test_candidate_that_a_region_lacks_is_left_out_with_its_reason(account: list[AWS]) -> None:
    found, excluded = resolved(account[:1], instance_type=f"c5.large,{B}")
    assert [one.label for one in found] == [f"{B} on demand"]
    assert [(one.what, one.reason) for one in excluded] == [("c5.large on demand", "c5.large has no GPU")]
    with pytest.raises(CloudDDPError, match=r"c5\.large or m5\.large could not be launched in any"):
        resolved(account[:1], instance_type="c5.large,m5.large")


def test_type_that_the_image_cannot_run_on_is_left_out(account: list[AWS]) -> None:
    ec2 = account[0].client("ec2")
    images = ec2.describe_images(Owners=["amazon"])["Images"]
    image = next(one["ImageId"] for one in images if one["Architecture"] == "x86_64")
    found, excluded = resolved(account[:1], instance_type=f"{B},g5g.xlarge", image=image)
    assert [one.label for one in found] == [f"{B} on demand"]
    assert [one.reason for one in excluded] == [f"image {image} is for x86_64, g5g.xlarge is arm64"]
