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
from support.labnode import LabLaptop, shell

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
    threads = [*Path(f"/proc/{lab.pid}/task").iterdir()]
    assert len(threads) < 120  # connections are accepted in order, so all 200 have been accepted
    assert until(lambda: "left: 0" in shell(ssh, "cat crowd"), 120)
