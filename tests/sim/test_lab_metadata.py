"""What nodes of the lab read at 169.254.169.254: the instance metadata service, version 2."""

from __future__ import annotations

import json
import re
import shlex
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import paramiko
import pytest
from lab import LabLaptop, attempt, inside, shell
from simlab import until

from cloudddp.errors import UsageError
from cloudddp.sim import control

# On the node with its own Python: METHOD PATH HEADER=VALUE ... -> status, body, headers.
ASK = """
import http.client, json, sys
line = http.client.HTTPConnection("169.254.169.254", timeout=30)
line.request(sys.argv[1], sys.argv[2], headers=dict(h.split("=", 1) for h in sys.argv[3:]))
answer = line.getresponse()
print(json.dumps([answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}]))
"""
TTL, TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
SPOT = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}}


class Asking:
    """A node that asks; with a token of its own unless it is told not to."""

    def __init__(self, client: paramiko.SSHClient) -> None:
        self._client = client
        self._token = ""

    def raw(self, method: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        words = [f"{name.replace('_', '-')}={value}" for name, value in headers.items()]
        command = shlex.join(["/opt/pytorch/bin/python", "-c", ASK, method, path, *words])
        status, body, answered = json.loads(shell(self._client, command))
        return status, body, answered

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
def instance(neighbour: LabLaptop) -> dict[str, Any]:
    tags = [{"Key": "Name", "Value": "one"}, {"Key": "cloudddp:cluster", "Value": "c"}]
    return neighbour.launch(
        MetadataOptions={"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )[0]


@pytest.fixture(scope="module")
def client(neighbour: LabLaptop, instance: dict[str, Any]) -> paramiko.SSHClient:
    return neighbour.login(instance)


@pytest.fixture(scope="module")
def ask(client: paramiko.SSHClient) -> Asking:
    return Asking(client)


def test_without_a_token_nothing_is_told(ask: Asking) -> None:
    assert ask.raw("GET", "/latest/meta-data/instance-id")[0] == 401
    assert ask.raw("GET", "/latest/meta-data/instance-id", **{TOKEN: "nonsense"})[0] == 401
    forged = ask.token()[:-5] + "AAAA="
    assert ask.raw("GET", "/latest/meta-data/instance-id", **{TOKEN: forged})[0] == 401


@pytest.mark.parametrize("seconds", ["0", "21601", "-1", "soon", "1.5"])
def test_a_token_wants_a_time_to_live_from_1_to_21600_seconds(ask: Asking, seconds: str) -> None:
    assert ask.raw("PUT", "/latest/api/token", **{TTL: seconds})[0] == 400


def test_a_token_needs_its_header_and_is_not_given_to_a_proxy(ask: Asking) -> None:
    assert ask.raw("PUT", "/latest/api/token")[0] == 400
    assert ask.raw("PUT", "/latest/api/token", **{TTL: "60", "X-Forwarded-For": "1.2.3.4"})[0] == 403
    assert ask.raw("GET", "/latest/api/token")[0] == 405


def test_a_token_ends_with_its_time(ask: Asking) -> None:
    token = ask.token(1)
    until(lambda: ask.raw("GET", "/latest/meta-data/instance-id", **{TOKEN: token})[0] == 401)


def test_the_time_that_a_token_has_left_is_told(ask: Asking) -> None:
    token = ask.token(600)
    status, _, headers = ask.raw("GET", "/latest/meta-data/", **{TOKEN: token})
    assert status == 200
    assert 0 < int(headers[TTL.lower()]) <= 600


def test_another_nodes_token_is_no_good(resident: LabLaptop, ask: Asking) -> None:
    other = Asking(resident.login(resident.launch()[0]))
    assert ask.raw("GET", "/latest/meta-data/instance-id", **{TOKEN: other.token()})[0] == 401


def test_what_a_node_reads_is_what_the_api_says(
    ask: Asking, instance: dict[str, Any], neighbour: LabLaptop
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
        "public-keys/": f"0={neighbour.name}",
        "public-keys/0/": "openssh-key",
        "public-keys/0/openssh-key": neighbour.key.public,
        "security-groups": neighbour.name,
    }
    assert {path: ask(f"meta-data/{path}") for path in expected} == expected
    (reservation,) = neighbour.ec2.describe_instances(InstanceIds=[instance["InstanceId"]])["Reservations"]
    assert ask("meta-data/reservation-id") == reservation["ReservationId"]


def test_the_interface_is_under_its_mac_address(
    ask: Asking, instance: dict[str, Any], client: paramiko.SSHClient
) -> None:
    mac = ask("meta-data/mac")
    assert mac == shell(client, "cat /sys/class/net/ens5/address")
    assert ask("meta-data/network/interfaces/macs/") == f"{mac}/"
    here = f"meta-data/network/interfaces/macs/{mac}"
    assert ask(f"{here}/device-number") == "0"
    assert ask(f"{here}/subnet-id") == instance["SubnetId"]
    assert ask(f"{here}/vpc-id") == instance["VpcId"]
    assert ask(f"{here}/local-ipv4s") == instance["PrivateIpAddress"]
    assert ask(f"{here}/security-group-ids") == instance["SecurityGroups"][0]["GroupId"]
    assert ask(f"{here}/ipv4-associations/{instance['PublicIpAddress']}") == instance["PrivateIpAddress"]


def test_everything_that_is_listed_is_there(ask: Asking, client: paramiko.SSHClient) -> None:
    walk = r"""
import sys, urllib.request
def get(path):
    request = urllib.request.Request("http://169.254.169.254/latest/" + path, headers={"X-aws-ec2-metadata-token": sys.argv[1]})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()
def visit(path):
    for line in get(path).splitlines():
        name = line.partition("=")[0] + "/" if path.endswith("public-keys/") else line
        visit(path + name) if name.endswith("/") else print(path + name, len(get(path + name)) > 0)
visit("")
"""
    seen = shell(client, shlex.join(["/opt/pytorch/bin/python", "-c", walk, ask.token()])).splitlines()
    assert {"meta-data/placement/region True", "dynamic/instance-identity/document True"} <= set(seen)
    assert [line for line in seen if not line.endswith(" True")] == []


def test_the_identity_document_is_the_instances(ask: Asking, instance: dict[str, Any]) -> None:
    document = json.loads(ask("dynamic/instance-identity/document"))
    assert (document["instanceId"], document["privateIp"]) == (
        instance["InstanceId"],
        instance["PrivateIpAddress"],
    )
    assert (document["region"], document["accountId"]) == ("us-east-1", "123456789012")
    assert ask.get("dynamic/instance-identity/signature")[0] == 404  # nobody but AWS can make one


def test_the_user_data_is_as_it_was_launched_with(ask: Asking, neighbour: LabLaptop) -> None:
    assert ask("user-data") == neighbour.user_data()


def test_tags_are_shown_where_the_instance_allows_it(ask: Asking) -> None:
    assert ask("meta-data/tags/instance/Name") == "one"
    assert ask("meta-data/tags/instance/cloudddp:cluster") == "c"
    assert ask("meta-data/tags/instance/").splitlines() == ["Name", "cloudddp:cluster"]


@pytest.mark.parametrize(
    "path",
    [
        "meta-data/nothing",
        "meta-data/instance-id/x",
        "meta-data/spot/instance-action",
        "x",
        "../latest/user-data",
    ],
)
def test_what_is_not_there_is_not_found(ask: Asking, path: str) -> None:
    assert ask.get(path)[0] == 404


def test_the_sdk_of_aws_finds_its_region_here(client: paramiko.SSHClient) -> None:
    """botocore's own metadata client, on the node: a witness that nobody here wrote."""
    code = "import botocore.utils; print(botocore.utils.InstanceMetadataRegionFetcher(timeout=30).retrieve_region())"
    environment = "env -u AWS_EC2_METADATA_DISABLED"
    assert shell(client, f"{environment} /opt/pytorch/bin/python -c {shlex.quote(code)}") == "us-east-1"


def test_an_instance_may_allow_the_first_version_hide_its_tags_and_have_no_user_data(
    resident: LabLaptop,
) -> None:
    node = resident.launch(MetadataOptions={"HttpTokens": "optional"}, UserData="")[0]
    ask = Asking(resident.meet(node))
    assert ask.raw("GET", "/latest/meta-data/instance-id")[:2] == (200, node["InstanceId"])
    assert ask.raw("GET", "/latest/meta-data/instance-id", **{TOKEN: "nonsense"})[0] == 401
    assert ask.raw("GET", "/latest/meta-data/tags/instance/")[0] == 404
    assert ask.raw("GET", "/latest/user-data")[0] == 404


def test_an_endpoint_that_is_disabled_answers_403_to_everything(resident: LabLaptop) -> None:
    ask = Asking(resident.login(resident.launch(MetadataOptions={"HttpEndpoint": "disabled"})[0]))
    assert ask.raw("PUT", "/latest/api/token", **{TTL: "60"})[0] == 403
    assert ask.raw("GET", "/latest/meta-data/")[0] == 403


def test_options_that_are_changed_hold_from_then_on(resident: LabLaptop) -> None:
    node = resident.launch(MetadataOptions={"HttpTokens": "optional"})[0]
    ask = Asking(resident.login(node))
    assert ask.raw("GET", "/latest/meta-data/instance-id")[0] == 200
    resident.ec2.modify_instance_metadata_options(InstanceId=node["InstanceId"], HttpTokens="required")
    assert ask.raw("GET", "/latest/meta-data/instance-id")[0] == 401


def test_the_laptop_is_hung_up_on(lab: control.Simulator) -> None:
    with inside(lab), socket.create_connection(("169.254.169.254", 80), timeout=30) as line:
        line.sendall(b"GET /latest/meta-data/ HTTP/1.0\r\n\r\n")
        try:
            assert line.recv(100) == b""
        except ConnectionResetError:
            pass


def test_a_spot_node_reads_its_notice_and_is_terminated_when_its_time_has_come(resident: LabLaptop) -> None:
    node, other = resident.launch(2, InstanceMarketOptions=SPOT)
    ask = Asking(resident.login(node))
    assert ask("meta-data/instance-life-cycle") == "spot"
    assert [ask.get(f"meta-data/{path}")[0] for path in NOTICES] == [404, 404, 404]
    said = control.interrupt(resident.sim, node["InstanceId"], seconds=3600)
    action, termination, rebalance = (ask(f"meta-data/{path}") for path in NOTICES)
    assert json.loads(action) == {"action": "terminate", "time": said["time"]}
    assert termination == said["time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", said["time"])
    assert json.loads(rebalance)["noticeTime"] <= said["time"]
    assert resident.state(node["InstanceId"]) == "running"
    said = control.interrupt(resident.sim, other["InstanceId"], seconds=1)
    until(lambda: resident.state(other["InstanceId"]) == "terminated")
    assert datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") >= said["time"]
    (gone,) = resident.describe(other["InstanceId"])
    assert gone["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    (request,) = resident.ec2.describe_spot_instance_requests(
        SpotInstanceRequestIds=[gone["SpotInstanceRequestId"]]
    )["SpotInstanceRequests"]
    assert (request["State"], request["Status"]["Code"]) == ("closed", "instance-terminated-no-capacity")


NOTICES = ("spot/instance-action", "spot/termination-time", "events/recommendations/rebalance")


def test_only_a_spot_node_that_has_had_no_notice_can_be_interrupted(resident: LabLaptop, ask: Asking) -> None:
    fixed, spot = resident.launch()[0], resident.launch(InstanceMarketOptions=SPOT)[0]
    with pytest.raises(UsageError, match="no spot instance"):
        control.interrupt(resident.sim, fixed["InstanceId"], seconds=5)
    with pytest.raises(UsageError, match="there is no node"):
        control.interrupt(resident.sim, "i-nobody", seconds=5)
    for seconds in (-1, 1e12):
        with pytest.raises(UsageError, match="seconds are"):
            control.interrupt(resident.sim, spot["InstanceId"], seconds=seconds)
    control.interrupt(resident.sim, spot["InstanceId"], seconds=3600)
    with pytest.raises(UsageError, match="has had its notice"):
        control.interrupt(resident.sim, spot["InstanceId"], seconds=3600)


def test_a_user_who_terminates_first_is_the_reason(resident: LabLaptop) -> None:
    node = resident.launch(InstanceMarketOptions=SPOT)[0]
    control.interrupt(resident.sim, node["InstanceId"], seconds=3600)
    resident.terminate(node["InstanceId"])
    assert resident.describe(node["InstanceId"])[0]["StateReason"]["Code"] == "Client.UserInitiatedShutdown"


def test_no_group_and_no_rule_cuts_a_node_off_from_its_metadata(resident: LabLaptop) -> None:
    resident.ec2.revoke_security_group_egress(
        GroupId=resident.group, IpPermissions=[{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    )
    client = resident.login(resident.launch()[0])
    assert Asking(client)("meta-data/placement/region") == "us-east-1"
    assert attempt(client, "timeout 2 bash -c '</dev/tcp/169.254.169.254/22'").status != 0


CROWD = """
import socket, time
lines = [socket.create_connection(("169.254.169.254", 80), 30) for _ in range(200)]
print("up", flush=True)
end = time.monotonic() + 120
left = []
for line in lines[:1] + lines[-1:]:
    line.settimeout(0.5)
    while time.monotonic() < end:
        try:
            line.sendall(b"G")  # never the end of a request, and never quiet
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


def test_a_node_that_takes_every_connection_keeps_neither_them_nor_the_server(
    resident: LabLaptop, lab: control.Simulator
) -> None:
    greedy, other = resident.launch(2)
    ssh, ask = resident.login(greedy), Asking(resident.login(other))
    shell(
        ssh,
        f"nohup python3 -c {shlex.quote(CROWD)} > crowd 2>&1 & until grep -q up crowd; do sleep 0.05; done",
    )
    assert ask("meta-data/instance-id") == other["InstanceId"]
    assert threads(lab) < 120  # who calls first is taken first: the 200 have been looked at
    assert until(lambda: "left: 0" in shell(ssh, "cat crowd"), 120)


def threads(lab: control.Simulator) -> int:
    return len(list(Path(f"/proc/{lab.pid}/task").iterdir()))
