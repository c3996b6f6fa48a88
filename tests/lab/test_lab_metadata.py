"""The instance metadata service at 169.254.169.254, as namespace nodes see it."""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.harness import until
from support.labnode import LabLaptop, attempt, shell

from cloudddp.errors import UsageError
from cloudddp.simulator import control

# Runs on the node: METHOD PATH HEADER=VALUE ... -> status, body, headers.
SEND_REQUEST = """
import http.client, json, sys
line = http.client.HTTPConnection("169.254.169.254", timeout=300)
line.request(sys.argv[1], sys.argv[2], headers=dict(h.split("=", 1) for h in sys.argv[3:]))
answer = line.getresponse()
print(json.dumps([answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}]))
"""
TTL, TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
SPOT = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}}


class MetadataClient:
    """Sends requests from a node, with a token by default."""

    def __init__(self, client: paramiko.SSHClient) -> None:
        self._client = client
        self._token = ""

    def raw(self, method: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        words = [f"{name.replace('_', '-')}={value}" for name, value in headers.items()]
        command = shlex.join(["/opt/pytorch/bin/python", "-c", SEND_REQUEST, method, path, *words])
        status, body, response_headers = json.loads(shell(self._client, command))
        return status, body, response_headers

    def token(self, seconds: int | str = 21600) -> str:
        status, token, _ = self.raw("PUT", "/latest/api/token", **{TTL: str(seconds)})
        assert status == 200
        return token

    def get(self, path: str) -> tuple[int, str]:
        self._token = self._token or self.token()
        return self.raw("GET", f"/latest/{path}", **{TOKEN: self._token})[:2]

    def __call__(self, path: str) -> str:
        status, body = self.get(path)
        assert status == 200, (path, status)
        return body


@pytest.fixture(scope="module")
def instance(shared_lab_laptop: LabLaptop) -> dict[str, Any]:
    tags = [{"Key": "Name", "Value": "one"}, {"Key": "cloudddp:cluster", "Value": "c"}]
    return shared_lab_laptop.launch(
        MetadataOptions={"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )[0]


@pytest.fixture(scope="module")
def client(shared_lab_laptop: LabLaptop, instance: dict[str, Any]) -> paramiko.SSHClient:
    return shared_lab_laptop.login(instance)


@pytest.fixture(scope="module")
def metadata(client: paramiko.SSHClient) -> MetadataClient:
    return MetadataClient(client)


def test_token_is_required(lab_laptop: LabLaptop, metadata: MetadataClient) -> None:
    def status(token: str) -> int:
        return metadata.raw("GET", "/latest/meta-data/instance-id", **{TOKEN: token})[0]

    assert metadata.raw("GET", "/latest/meta-data/instance-id")[0] == 401
    of_another = MetadataClient(lab_laptop.login(lab_laptop.launch()[0])).token()
    for token in ("nonsense", metadata.token()[:-5] + "AAAA=", of_another):
        assert status(token) == 401
    for seconds in ("0", "21601", "-1", "soon", "1.5"):
        assert metadata.raw("PUT", "/latest/api/token", **{TTL: seconds})[0] == 400
    assert metadata.raw("PUT", "/latest/api/token")[0] == 400
    assert metadata.raw("PUT", "/latest/api/token", **{TTL: "60", "X-Forwarded-For": "1.2.3.4"})[0] == 403
    assert metadata.raw("GET", "/latest/api/token")[0] == 405
    found, _, headers = metadata.raw("GET", "/latest/meta-data/", **{TOKEN: metadata.token(600)})
    assert found == 200
    assert 0 < int(headers[TTL.lower()]) <= 600
    short = metadata.token(1)
    until(lambda: status(short) == 401)


def test_metadata_matches_the_api(
    metadata: MetadataClient, instance: dict[str, Any], shared_lab_laptop: LabLaptop
) -> None:
    expected = {
        "ami-id": instance["ImageId"],
        "ami-launch-index": "0",
        "hostname": instance["PrivateDnsName"],
        "instance-id": instance["InstanceId"],
        "instance-life-cycle": "on-demand",
        "instance-type": "g5.12xlarge",
        "local-hostname": instance["PrivateDnsName"],
        "local-ipv4": instance["PrivateIpAddress"],
        "placement/availability-zone": instance["Placement"]["AvailabilityZone"],
        "placement/region": "us-east-1",
        "public-ipv4": instance["PublicIpAddress"],
        "public-keys/": f"0={shared_lab_laptop.name}",
        "public-keys/0/": "openssh-key",
        "public-keys/0/openssh-key": shared_lab_laptop.key.public,
        "security-groups": shared_lab_laptop.name,
    }
    assert {path: metadata(f"meta-data/{path}") for path in expected} == expected
    (reservation,) = shared_lab_laptop.ec2.describe_instances(InstanceIds=[instance["InstanceId"]])[
        "Reservations"
    ]
    assert metadata("meta-data/reservation-id") == reservation["ReservationId"]
    assert metadata("meta-data/tags/instance/Name") == "one"
    assert metadata("meta-data/tags/instance/").splitlines() == ["Name", "cloudddp:cluster"]
    assert metadata("user-data") == shared_lab_laptop.user_data()
    document = json.loads(metadata("dynamic/instance-identity/document"))
    assert document["instanceId"] == instance["InstanceId"]
    assert document["privateIp"] == instance["PrivateIpAddress"]
    assert (document["region"], document["accountId"]) == ("us-east-1", "123456789012")
    for path in (
        "dynamic/instance-identity/signature",  # only AWS can create one
        "meta-data/nothing",
        "meta-data/instance-id/x",
        "x",
        "../latest/user-data",
    ):
        assert metadata.get(path)[0] == 404, path


def test_interface_by_mac_address(
    metadata: MetadataClient, instance: dict[str, Any], client: paramiko.SSHClient
) -> None:
    mac = metadata("meta-data/mac")
    assert mac == shell(client, "cat /sys/class/net/ens5/address")
    assert metadata("meta-data/network/interfaces/macs/") == f"{mac}/"
    here = f"meta-data/network/interfaces/macs/{mac}"
    assert metadata(f"{here}/device-number") == "0"
    assert metadata(f"{here}/subnet-id") == instance["SubnetId"]
    assert metadata(f"{here}/vpc-id") == instance["VpcId"]
    assert metadata(f"{here}/local-ipv4s") == instance["PrivateIpAddress"]
    assert metadata(f"{here}/security-group-ids") == instance["SecurityGroups"][0]["GroupId"]
    assert metadata(f"{here}/ipv4-associations/{instance['PublicIpAddress']}") == instance["PrivateIpAddress"]


def test_every_listed_path_exists(metadata: MetadataClient, client: paramiko.SSHClient) -> None:
    walk = r"""
import sys, urllib.request
def get(path):
    request = urllib.request.Request("http://169.254.169.254/latest/" + path, headers={"X-aws-ec2-metadata-token": sys.argv[1]})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()
def visit(path):
    for line in get(path).splitlines():
        name = line.partition("=")[0] + "/" if path.endswith("public-keys/") else line
        visit(path + name) if name.endswith("/") else print(path + name, len(get(path + name)) > 0)
visit("")
"""  # noqa: E501
    seen = shell(client, shlex.join(["/opt/pytorch/bin/python", "-c", walk, metadata.token()])).splitlines()
    assert {"meta-data/placement/region True", "dynamic/instance-identity/document True"} <= set(seen)
    assert [line for line in seen if not line.endswith(" True")] == []


def test_metadata_options_of_an_instance(lab_laptop: LabLaptop) -> None:
    node = lab_laptop.launch(MetadataOptions={"HttpTokens": "optional"}, UserData="")[0]
    metadata = MetadataClient(lab_laptop.login_unverified(node))
    assert metadata.raw("GET", "/latest/meta-data/instance-id")[:2] == (200, node["InstanceId"])
    assert metadata.raw("GET", "/latest/meta-data/instance-id", **{TOKEN: "nonsense"})[0] == 401
    assert metadata.raw("GET", "/latest/meta-data/tags/instance/")[0] == 404
    assert metadata.raw("GET", "/latest/user-data")[0] == 404
    change = lab_laptop.ec2.modify_instance_metadata_options
    change(InstanceId=node["InstanceId"], HttpTokens="required")
    assert metadata.raw("GET", "/latest/meta-data/instance-id")[0] == 401
    change(InstanceId=node["InstanceId"], HttpEndpoint="disabled")
    assert metadata.raw("PUT", "/latest/api/token", **{TTL: "60"})[0] == 403
    assert metadata.raw("GET", "/latest/meta-data/")[0] == 403


def test_spot_interruption_notice_and_termination(lab_laptop: LabLaptop) -> None:
    node, other = lab_laptop.launch(2, InstanceMarketOptions=SPOT)
    metadata = MetadataClient(lab_laptop.login(node))
    assert metadata("meta-data/instance-life-cycle") == "spot"
    assert [metadata.get(f"meta-data/{path}")[0] for path in NOTICES] == [404, 404, 404]
    interruption = control.interrupt(lab_laptop.sim, node["InstanceId"], seconds=3600)
    action, termination, rebalance = (metadata(f"meta-data/{path}") for path in NOTICES)
    assert json.loads(action) == {"action": "terminate", "time": interruption["time"]}
    assert termination == interruption["time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", interruption["time"])
    assert json.loads(rebalance)["noticeTime"] <= interruption["time"]
    assert lab_laptop.state(node["InstanceId"]) == "running"
    interruption = control.interrupt(lab_laptop.sim, other["InstanceId"], seconds=1)
    until(lambda: lab_laptop.state(other["InstanceId"]) == "terminated")
    assert datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") >= interruption["time"]
    (gone,) = lab_laptop.describe(other["InstanceId"])
    assert gone["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    (request,) = lab_laptop.ec2.describe_spot_instance_requests(
        SpotInstanceRequestIds=[gone["SpotInstanceRequestId"]]
    )["SpotInstanceRequests"]
    assert (request["State"], request["Status"]["Code"]) == ("closed", "instance-terminated-no-capacity")


NOTICES = ("spot/instance-action", "spot/termination-time", "events/recommendations/rebalance")


def test_only_a_spot_node_can_be_interrupted_once(lab_laptop: LabLaptop) -> None:
    fixed, spot = lab_laptop.launch()[0], lab_laptop.launch(InstanceMarketOptions=SPOT)[0]
    for name, seconds, words in (
        (fixed["InstanceId"], 5, "is not a spot instance"),
        ("i-unknown", 5, "no node"),
        (spot["InstanceId"], -1, "seconds must be"),
        (spot["InstanceId"], 1e12, "seconds must be"),
    ):
        with pytest.raises(UsageError, match=words):
            control.interrupt(lab_laptop.sim, name, seconds=seconds)
    control.interrupt(lab_laptop.sim, spot["InstanceId"], seconds=3600)
    with pytest.raises(UsageError, match="already has its notice"):
        control.interrupt(lab_laptop.sim, spot["InstanceId"], seconds=3600)
    lab_laptop.terminate(spot["InstanceId"])
    (shown,) = lab_laptop.describe(spot["InstanceId"])
    assert shown["StateReason"]["Code"] == "Client.UserInitiatedShutdown"


def test_metadata_is_not_subject_to_rules_and_faults(lab_laptop: LabLaptop) -> None:
    lab_laptop.ec2.revoke_security_group_egress(
        GroupId=lab_laptop.group, IpPermissions=[{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    )
    client = lab_laptop.login(lab_laptop.launch()[0])
    assert MetadataClient(client)("meta-data/placement/region") == "us-east-1"
    assert attempt(client, "timeout 2 bash -c '</dev/tcp/169.254.169.254/22'").status != 0


FLOOD = """
import socket, time
lines = [socket.create_connection(("169.254.169.254", 80), 30) for _ in range(200)]
print("up", flush=True)
end = time.monotonic() + 120
left = []
for line in lines[:1] + lines[-1:]:
    line.settimeout(0.5)
    while time.monotonic() < end:
        try:
            line.sendall(b"G")  # never completes the request, but stays active
            if not line.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        left.append(line)
print(f"left: {len(left)}", flush=True)
"""


def test_node_cannot_exhaust_the_metadata_server(lab_laptop: LabLaptop, lab: control.Simulator) -> None:
    greedy, other = lab_laptop.launch(2)
    ssh, metadata = lab_laptop.login(greedy), MetadataClient(lab_laptop.login(other))
    shell(
        ssh,
        f"nohup python3 -c {shlex.quote(FLOOD)} > crowd 2>&1 & until grep -q up crowd; do sleep 0.05; done",
    )
    assert metadata("meta-data/instance-id") == other["InstanceId"]
    assert threads(lab) < 120  # connections are accepted in order, so all 200 have been accepted
    assert until(lambda: "left: 0" in shell(ssh, "cat crowd"), 120)


def threads(lab: control.Simulator) -> int:
    return len(list(Path(f"/proc/{lab.pid}/task").iterdir()))
