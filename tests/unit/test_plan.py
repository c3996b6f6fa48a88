"""The plan of a cluster: the exact requests, the deadline and the price."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.programs import program

from cloudddp.aws.images import Image
from cloudddp.aws.instance_types import Device, TypeInfo
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cli.views import lifecycle
from cloudddp.cluster.plan import Plan, plan, plan_replacement, require_time
from cloudddp.cluster.prices import Price
from cloudddp.cluster.requests import Interface, LaunchContext, Request, client_token
from cloudddp.cluster.user_data import (
    APT_SETTINGS,
    BOOT_CHECK,
    IDLE_CHECK,
    IDLE_SERVICE,
    IDLE_TIMER,
    SERVICE,
    TIMER,
    Identity,
)
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import CloudDDPError
from cloudddp.files import payload_text
from cloudddp.simulator.guest.cloud_init import shellify
from cloudddp.ssh.target import generate_key
from cloudddp.tags import TAG_EXPIRES, TAG_NODE_RANK

NOW = datetime(2026, 11, 20, 12, 0, 0, 654321, tzinfo=UTC)


def subnet(zone: str) -> Subnet:
    return Subnet(f"subnet-{zone[-1] * 8}", "vpc-0abc", zone, 250, "10.0.0.0/24", False, True)


CONTEXT = LaunchContext(
    region="us-east-1",
    info=TypeInfo(
        name="g5.12xlarge", architectures=(), vcpus=48, devices=(Device("NVIDIA", "A10G", 4),), cards=1
    ),
    image=Image("ami-0abc", "an image", "/dev/sda1", 45, "ubuntu"),
    subnets=(subnet("us-east-1a"),),
    ssh_from=("203.0.113.7/32",),
    owner="me",
    now=NOW,
)
HOST_KEY = generate_key()
IDENTITY = Identity("c-1234", "ssh-ed25519 AAAAlogin", HOST_KEY.private, HOST_KEY.public)
DOLLAR = Price(node_hour=1.0, nodes=2, disk_gb=0, source="given")


def planned(
    spec: ClusterSpec | None = None, *, context: LaunchContext = CONTEXT, identity: Identity = IDENTITY
) -> Plan:
    return plan(spec or ClusterSpec(), context, identity, DOLLAR)


def sent(the_plan: Plan) -> tuple[Request, ...]:
    """Return the requests if the first zone has capacity."""
    return (*the_plan.requests, the_plan.launches[0].request)


def params(the_plan: Plan, step: str) -> Any:
    (found,) = [request.params for request in sent(the_plan) if request.step == step]
    return found


def config_of(the_plan: Plan) -> Any:
    text = params(the_plan, "nodes")["UserData"]
    assert text.startswith("#cloud-config\n")
    return yaml.safe_load(text)


@pytest.mark.parametrize(("kind", "minutes"), [("p5.48xlarge", 40), ("p6e-gb200.36xlarge", 70)])
def test_deadline_before_the_end_of_a_block(kind: str, minutes: int) -> None:
    """EC2 terminates the instances of UltraServers 60 minutes before, others 30; ten are for saving."""
    end = NOW.replace(microsecond=0) + timedelta(hours=3)
    block = Reservation("cr-1", "active", kind, "us-east-1a", 2, 2, "capacity-block", end=end)
    found = planned(context=replace(CONTEXT, reservation=block))
    assert found.expires == end - timedelta(minutes=minutes)
    shown = lifecycle.plan(found, CONTEXT.info, ClusterSpec())
    assert f"EC2 terminates its nodes {minutes - 10} minutes before" in shown


def test_elastic_ips_of_a_local_zone_belong_to_it() -> None:
    """Those of the region cannot be used there (EC2 API reference, AllocateAddress)."""
    (local,) = ClusterSpec(zones=("us-west-2-lax-1a",)).zones
    cards = (Interface(), Interface(1, 0, "efa-only"))
    for zone, group in (("us-west-2a", None), (local, "us-west-2-lax-1")):
        subnets = subnet(zone), subnet("us-west-2b")
        found = planned(context=replace(CONTEXT, region="us-west-2", subnets=subnets, interfaces=cards))
        assert params(found, "address-0").get("NetworkBorderGroup") == group
        assert (found.elastic_ips, planned().elastic_ips) == (2, 0)


def test_ssh_rules_for_ipv4_and_ipv6_and_another_port() -> None:
    context = replace(CONTEXT, ssh_from=("203.0.113.7/32", "2001:db8::7/128"))
    rules = params(planned(ClusterSpec(ssh_port=2222), context=context), "ingress-rules")["IpPermissions"][1:]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in rules] == [(2222, 2222)] * 2
    ranges = [[range_["CidrIp"] for range_ in rule.get("IpRanges", [])] for rule in rules]
    ranges += [[range_["CidrIpv6"] for range_ in rule.get("Ipv6Ranges", [])] for rule in rules]
    assert ranges == [["203.0.113.7/32"], [], [], ["2001:db8::7/128"]]


@pytest.mark.parametrize(("throughput", "iops"), [(125, 3000), (750, 3000), (1000, 4000), (2000, 8000)])
def test_volume_has_the_iops_that_its_throughput_needs(throughput: int, iops: int) -> None:
    spec = ClusterSpec(disk_gb=200, disk_throughput=throughput)
    (disk,) = params(planned(spec), "nodes")["BlockDeviceMappings"]
    found = [disk["Ebs"][name] for name in ("VolumeSize", "Throughput", "Iops")]
    assert found == [200, throughput, iops]


def test_volumes_are_initialized_at_a_rate_and_the_plan_says_that_it_is_billed() -> None:
    spec = ClusterSpec(volume_init_rate=300)
    the_plan = planned(spec)
    assert params(the_plan, "nodes")["BlockDeviceMappings"][0]["Ebs"]["VolumeInitializationRate"] == 300
    shown = lifecycle.plans([the_plan], CONTEXT.info, spec)
    assert "at 300 MiB/s; billed per GiB, up to 45 on each node (aws.amazon.com/ebs/pricing)" in shown
    assert "MiB/s" not in lifecycle.plans([planned()], CONTEXT.info, ClusterSpec())


def test_private_host_key_is_only_in_the_user_data() -> None:
    the_plan = planned()
    assert params(the_plan, "key-pair")["PublicKeyMaterial"] == b"ssh-ed25519 AAAAlogin"
    secret = HOST_KEY.private.splitlines()[2]
    holders = [
        (request.step, key)
        for request in sent(the_plan)
        for key, value in request.params.items()
        if secret in repr(value)
    ]
    assert holders == [("nodes", "UserData")]


def test_client_token_is_deterministic_and_valid() -> None:
    launch = params(planned(), "nodes")
    token = launch["ClientToken"]
    request = {key: value for key, value in launch.items() if key != "ClientToken"}
    assert token == client_token("c-1234", 1, "us-east-1a", request)  # the first attempt
    assert token.startswith("c-1234-")
    assert token == params(planned(), "nodes")["ClientToken"]
    assert token.isascii()
    assert len(token) <= 64


def test_client_token_depends_on_cluster_attempt_zone_and_request() -> None:
    first = ("c-1", 1, "us-east-1a", 1)
    others = [(*first[:at], other, *first[at + 1 :]) for at, other in enumerate(("c-2", 2, "us-east-1b", 2))]
    tokens = [client_token(*one, {"MinCount": count}) for *one, count in (first, *others, first)]  # type: ignore[arg-type]
    assert (len(set(tokens)), tokens[0]) == (5, tokens[-1])


def test_user_data_contains_host_key_and_deadline() -> None:
    config = config_of(planned(ClusterSpec(max_hours=2.0)))
    assert config["ssh_deletekeys"] is True
    assert config["ssh_keys"] == {"ed25519_private": HOST_KEY.private, "ed25519_public": HOST_KEY.public}
    paths = {file["path"] for file in config["write_files"]}
    assert paths == {APT_SETTINGS, BOOT_CHECK, IDLE_TIMER, IDLE_SERVICE, IDLE_CHECK}
    assert config["runcmd"][1] == ["systemctl", "enable", "--now", TIMER.rsplit("/", 1)[1]]
    text = json.dumps(config)
    assert not re.findall("@[A-Z]+@", text), "a placeholder is left"
    assert len(text) < 16 * 1024


def run_bootcmd(the_plan: Plan, folder: Path) -> list[str]:
    """Run bootcmd with the units in a folder, and return the arguments of each systemctl."""
    program(folder / "systemctl", f'echo "$@" >> {folder}/called')
    script = shellify(config_of(the_plan)["bootcmd"]).replace(str(Path(TIMER).parent), str(folder))
    subprocess.run(
        ["sh"], input=script, text=True, env={"PATH": f"{folder}:/usr/bin:/bin"}, check=True, timeout=300
    )
    return (folder / "called").read_text().splitlines()


def test_bootcmd_arms_the_deadline(tmp_path: Path) -> None:
    called = run_bootcmd(planned(ClusterSpec(max_hours=2.0)), tmp_path)
    assert called == ["daemon-reload", "start --no-block cloudddp-deadline.timer"]
    assert "OnCalendar=2026-11-20 14:00:00 UTC\n" in (tmp_path / Path(TIMER).name).read_text()
    assert (tmp_path / Path(SERVICE).name).read_text() == payload_text("infra/node/cloudddp-deadline.service")
    # At the next boot it keeps a timer that was changed.
    (tmp_path / Path(TIMER).name).write_text("changed\n")
    run_bootcmd(planned(), tmp_path)
    assert (tmp_path / Path(TIMER).name).read_text() == "changed\n"


@pytest.mark.parametrize(("hours", "shut_down"), [(-1.0, True), (1.0, False)])
def test_boot_check_shuts_down_after_the_deadline(tmp_path: Path, hours: float, shut_down: bool) -> None:
    """Runs the boot check of the user data with a systemctl that records its arguments."""
    now = datetime.now(UTC) + timedelta(hours=hours) - timedelta(hours=2)
    config = config_of(planned(ClusterSpec(max_hours=2.0), context=replace(CONTEXT, now=now)))
    program(tmp_path / "systemctl", f'echo "$@" > {tmp_path}/called')
    (script,) = [file for file in config["write_files"] if file["path"] == BOOT_CHECK]
    assert (script["permissions"], config["runcmd"][-1]) == ("0755", ["sh", BOOT_CHECK])
    (tmp_path / "check").write_text(script["content"])
    subprocess.run(
        ["sh", tmp_path / "check"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=300
    )
    assert (tmp_path / "called").exists() == shut_down
    if shut_down:
        assert (tmp_path / "called").read_text() == "start --no-block cloudddp-deadline.service\n"


def test_timer_deadline_equals_the_tag(tmp_path: Path) -> None:
    the_plan = planned(ClusterSpec(max_hours=3.0, max_cost=1.0))
    run_bootcmd(the_plan, tmp_path)
    timer = (tmp_path / Path(TIMER).name).read_text()
    (line,) = [line for line in timer.splitlines() if line.startswith("OnCalendar=")]
    armed = datetime.strptime(line, "OnCalendar=%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
    assert armed == the_plan.expires < NOW + timedelta(hours=1)


def test_max_hours_sets_the_deadline_and_max_cost_an_earlier_one() -> None:
    the_plan = planned(ClusterSpec(max_hours=1.5))
    assert the_plan.created == NOW.replace(microsecond=0)
    assert the_plan.expires - the_plan.created == timedelta(hours=1.5)
    assert the_plan.hours == 1.5
    the_plan = planned(ClusterSpec(max_hours=8.0, max_cost=3.0))
    assert the_plan.hours < 1.5
    assert 2.99 < the_plan.cost <= 3.0


def test_replacement_is_one_node_with_the_rank_that_it_takes() -> None:
    """Of a cluster of two, with another node's rank in its tags."""
    launch, expires = params(planned(ClusterSpec(nodes=2)), "nodes"), NOW + timedelta(minutes=10)
    launch["TagSpecifications"][0]["Tags"].append({"Key": TAG_NODE_RANK, "Value": "0"})
    sent_now = plan_replacement(launch, "c-1234", "data", 1, "us-east-1a", 2, expires).request.params
    assert (sent_now["MinCount"], sent_now["MaxCount"]) == (1, 1)
    for one in sent_now["TagSpecifications"]:
        ranks = [tag["Value"] for tag in one["Tags"] if tag["Key"] == TAG_NODE_RANK]
        assert ranks == ["1"]
        ends = [tag["Value"] for tag in one["Tags"] if tag["Key"] == TAG_EXPIRES]
        assert ends == ["2026-11-20T12:10:00Z"]  # as it is now: `extend` may have moved that of `up`


def test_replacement_that_could_not_boot_before_the_deadline_is_refused() -> None:
    with pytest.raises(CloudDDPError, match="is at 2026-11-20 12:09 UTC, too soon to replace a node"):
        require_time(NOW + timedelta(minutes=9), NOW)
