"""The lab's firewall enforces security groups as EC2 does, for ingress and egress."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support.account import refused
from support.harness import cannot, until
from support.labnode import (
    LabLaptop,
    attempt,
    call,
    network_namespace,
    reachable,
    serve,
    shell,
    unavailable_reason,
)

from cloudddp.sim import control

ANYONE = [{"CidrIp": "0.0.0.0/0"}]
EVERYTHING = {"IpProtocol": "-1", "IpRanges": ANYONE}


def tcp(port: int, *, cidr: str = "0.0.0.0/0") -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [{"CidrIp": cidr}]}


def allow(laptop: LabLaptop, group: str, rule: dict[str, Any]) -> None:
    laptop.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])


def call_from_inside(laptop: LabLaptop, node: Any, address: str, port: int = 4000) -> str:
    """As `call`, for nodes that SSH does not reach. Returns the error if the connection fails."""
    node_shown = next(one for one in control.nodes(laptop.sim) if one["instance_id"] == node["InstanceId"])
    with network_namespace(Path(f"/proc/{node_shown['home'].split('/')[2]}/ns/net")):
        try:
            with socket.create_connection((address, port), timeout=1.5) as connection:
                return connection.recv(99).decode()
        except OSError as error:
            return str(error)


def make_vpc(laptop: LabLaptop, network: str) -> tuple[str, str, str]:
    """Create a VPC with a public subnet and a group without ingress rules. Returns their ids."""
    vpc = laptop.ec2.create_vpc(CidrBlock=network)["Vpc"]["VpcId"]
    block = str(next(ipaddress.ip_network(network).subnets(new_prefix=20)))
    request = {"VpcId": vpc, "CidrBlock": block, "AvailabilityZone": f"{laptop.sim.region}a"}
    subnet = laptop.ec2.create_subnet(**request)["Subnet"]["SubnetId"]
    gateway = laptop.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    laptop.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (main,) = laptop.ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
    route = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": gateway}
    laptop.ec2.create_route(RouteTableId=main["RouteTableId"], **route)
    group = laptop.ec2.create_security_group(GroupName="there", Description="d", VpcId=vpc)["GroupId"]
    return vpc, subnet, group


def drop_vpc(laptop: LabLaptop, vpc: str, subnet: str, group: str) -> None:
    laptop.ec2.delete_security_group(GroupId=group)
    laptop.ec2.delete_subnet(SubnetId=subnet)
    attached = [{"Name": "attachment.vpc-id", "Values": [vpc]}]
    (gateway,) = laptop.ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]
    laptop.ec2.detach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc)
    laptop.ec2.delete_vpc(VpcId=vpc)


def on(subnet: str, *groups: str) -> dict[str, Any]:
    """An interface with a public address."""
    wanted = {"DeviceIndex": 0, "SubnetId": subnet, "AssociatePublicIpAddress": True}
    return {**wanted, "Groups": list(groups)} if groups else wanted


def test_ingress_needs_a_rule_which_is_effective_at_once(lab_laptop: LabLaptop) -> None:
    shut = lab_laptop.make_group("shut", itself=False, ssh=False)
    (node,) = lab_laptop.launch(1, SecurityGroupIds=[shut])
    address = node["PublicIpAddress"]
    assert not reachable(lab_laptop.sim, address, 22)
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    elsewhere = {**ssh, "IpRanges": [{"CidrIp": "192.0.2.0/24"}]}
    lab_laptop.ec2.authorize_security_group_ingress(GroupId=shut, IpPermissions=[elsewhere])
    assert not reachable(lab_laptop.sim, address, 22)
    here = {**ssh, "IpRanges": [{"CidrIp": "203.0.113.10/32"}]}
    lab_laptop.ec2.authorize_security_group_ingress(GroupId=shut, IpPermissions=[here])
    assert until(lambda: reachable(lab_laptop.sim, address, 22))
    lab_laptop.ec2.revoke_security_group_ingress(GroupId=shut, IpPermissions=[here])
    assert not reachable(lab_laptop.sim, address, 22)


def test_group_members_need_a_self_referencing_rule(lab_laptop: LabLaptop) -> None:
    alone = lab_laptop.make_group("alone", itself=False)
    first, second = lab_laptop.launch(2, SecurityGroupIds=[alone])
    serve(lab_laptop.login(second))
    assert call(lab_laptop, first, second["PrivateIpAddress"], seconds=1) == ""
    rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": alone}]}]
    lab_laptop.ec2.authorize_security_group_ingress(GroupId=alone, IpPermissions=rule)
    until(lambda: call(lab_laptop, first, second["PrivateIpAddress"]) == first["PrivateIpAddress"])
    # Rules for groups apply to private addresses.
    assert call(lab_laptop, first, second["PublicIpAddress"]) == ""


def test_egress_rules_apply_to_the_original_destination(lab_laptop: LabLaptop) -> None:
    shut = lab_laptop.make_group("may not send")
    lab_laptop.ec2.revoke_security_group_egress(GroupId=shut, IpPermissions=[EVERYTHING])
    (node,) = lab_laptop.launch(1, SecurityGroupIds=[shut])
    (peer,) = lab_laptop.launch(1, SecurityGroupIds=[lab_laptop.group])
    allow(lab_laptop, lab_laptop.group, tcp(4000))
    serve(lab_laptop.login(peer))
    private, public = peer["PrivateIpAddress"], peer["PublicIpAddress"]

    def response(address: str) -> str:
        return call(lab_laptop, node, address, seconds=1)

    assert [response(private), response(public)] == ["", ""]
    for allowed, address, expected, other in (
        (f"{private}/32", private, node["PrivateIpAddress"], public),
        (f"{public}/32", public, node["PublicIpAddress"], private),
    ):
        rule = [tcp(4000, cidr=allowed)]
        lab_laptop.ec2.authorize_security_group_egress(GroupId=shut, IpPermissions=rule)
        until(lambda address=address, expected=expected: response(address) == expected)
        assert response(other) == ""
        lab_laptop.ec2.revoke_security_group_egress(GroupId=shut, IpPermissions=rule)
    itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": lab_laptop.group}]}]
    lab_laptop.ec2.authorize_security_group_egress(GroupId=shut, IpPermissions=itself)
    until(lambda: response(private) == node["PrivateIpAddress"])
    assert response(public) == ""
    lab_laptop.ec2.revoke_security_group_egress(GroupId=shut, IpPermissions=itself)


def test_node_without_public_address_reaches_no_public_address(lab_laptop: LabLaptop) -> None:
    interface = {"DeviceIndex": 0, "Groups": [lab_laptop.group], "AssociatePublicIpAddress": False}
    (node,) = lab_laptop.launch(1, NetworkInterfaces=[interface])
    (peer,) = lab_laptop.launch(1)
    allow(lab_laptop, lab_laptop.group, tcp(4000))
    assert "PublicIpAddress" not in node
    serve(lab_laptop.login(peer))
    until(lambda: call_from_inside(lab_laptop, node, peer["PrivateIpAddress"]) == node["PrivateIpAddress"])
    assert call_from_inside(lab_laptop, node, peer["PublicIpAddress"]) == "timed out"


def test_unknown_address_does_not_respond(lab_laptop: LabLaptop) -> None:
    (node,) = lab_laptop.launch(1)
    for address in ("8.8.8.8", "172.31.255.250", "10.1.2.3", "198.51.100.254", "203.0.113.77"):
        assert call_from_inside(lab_laptop, node, address) == "timed out"


def test_spoofed_source_address_is_dropped(lab_laptop: LabLaptop) -> None:
    group = lab_laptop.make_group("group")
    server, member = lab_laptop.launch(2, SecurityGroupIds=[group])
    (outsider,) = lab_laptop.launch(1)
    receive = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 5000)); "
        "print('up', flush=True)\n"
        "while True: print(s.recv(99).decode(), flush=True)"
    )
    receiver = lab_laptop.login(server)
    shell(
        receiver,
        f'nohup python3 -c "{receive}" > received 2>&1 & until grep -q up received; do sleep 0.05; done',
    )
    for node, word in ((outsider, "spoofed"), (member, "own")):
        # Root of a node may send raw packets; the kernel fills in header fields that are 0.
        send = (
            "import socket, struct; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW); "
            f"a, b = map(socket.inet_aton, ('{member['PrivateIpAddress']}', "
            f"'{server['PrivateIpAddress']}')); "
            f"u = struct.pack('!HHHH', 5001, 5000, 8 + {len(word)}, 0) + b'{word}'; "
            "s.sendto(struct.pack('!BBHHHBBH4s4s', 69, 0, 20 + len(u), 0, 0, 64, 17, 0, a, b) + u, "
            f"('{server['PrivateIpAddress']}', 0))"
        )
        shell(lab_laptop.login(node), f'sudo /opt/pytorch/bin/python -c "{send}"')
    until(lambda: "own" in shell(receiver, "cat received"))
    assert "spoofed" not in shell(receiver, "cat received")


def test_icmp_rules_by_type_and_code(lab_laptop: LabLaptop) -> None:
    group = lab_laptop.make_group("pinged", itself=False)
    first, second = lab_laptop.launch(2, SecurityGroupIds=[group])
    echo = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); "
        "s.settimeout(1); "
        f"s.sendto(bytes([8, 0, 0xf7, 0xff, 0, 0, 0, 0]), ('{second['PrivateIpAddress']}', 0)); "
        "print('reply', s.recv(99)[20])"
    )
    client = lab_laptop.login(first)

    def answer() -> str:
        return attempt(client, f'sudo /opt/pytorch/bin/python -c "{echo}"').out.decode().strip()

    assert answer() == ""
    for kind, code, expected in ((3, -1, ""), (8, 1, ""), (8, 0, "reply 0")):
        rule = {"IpProtocol": "icmp", "FromPort": kind, "ToPort": code, "IpRanges": ANYONE}
        allow(lab_laptop, group, rule)
        assert (until(answer) if expected else answer()) == expected


def test_default_group_allows_its_members_only(lab_laptop: LabLaptop) -> None:
    vpc, subnet, group = make_vpc(lab_laptop, "10.7.0.0/16")
    nodes = lab_laptop.launch(2, NetworkInterfaces=[on(subnet)])
    address = nodes[1]["PrivateIpAddress"]
    until(lambda: call_from_inside(lab_laptop, nodes[0], address, 22).startswith("SSH-2.0"))
    assert not reachable(lab_laptop.sim, nodes[0]["PublicIpAddress"], 22)
    lab_laptop.terminate(*(node["InstanceId"] for node in nodes))
    drop_vpc(lab_laptop, vpc, subnet, group)


def test_overlapping_vpcs_are_separate(lab_laptop: LabLaptop) -> None:
    vpc, subnet, group = make_vpc(lab_laptop, "172.31.0.0/16")
    allow(lab_laptop, group, EVERYTHING)
    allow(lab_laptop, lab_laptop.group, tcp(4000))
    (ours,) = lab_laptop.launch(1)
    (theirs,) = lab_laptop.launch(1, NetworkInterfaces=[on(subnet, group)])
    assert ours["PrivateIpAddress"] != theirs["PrivateIpAddress"]
    for node in (ours, theirs):
        serve(lab_laptop.login(node))
    for caller, called in ((ours, theirs), (theirs, ours)):
        assert call(lab_laptop, caller, called["PrivateIpAddress"], seconds=1) == ""
        until(
            lambda caller=caller, called=called: (
                call(lab_laptop, caller, called["PublicIpAddress"]) == caller["PublicIpAddress"]
            )
        )
    with refused("InvalidIPAddress.InUse"):
        lab_laptop.run(
            1, NetworkInterfaces=[{**on(subnet, group), "PrivateIpAddress": ours["PrivateIpAddress"]}]
        )
    lab_laptop.terminate(theirs["InstanceId"])
    drop_vpc(lab_laptop, vpc, subnet, group)


def test_invalid_rule_does_not_affect_others(
    lab_laptop: LabLaptop,
) -> None:
    # moto does not validate it here.
    bad = {"IpProtocol": "warp", "FromPort": 1, "ToPort": 2, "CidrIp": "0.0.0.0/0"}
    group = {
        "Type": "AWS::EC2::SecurityGroup",
        "Properties": {"GroupDescription": "d", "SecurityGroupIngress": [bad]},
    }
    stacks = lab_laptop.client("cloudformation")
    stacks.create_stack(StackName="bad", TemplateBody=json.dumps({"Resources": {"Bad": group}}))
    made = stacks.describe_stack_resources(StackName="bad")["StackResources"][0]["PhysicalResourceId"]
    (node,) = lab_laptop.launch(1, SecurityGroupIds=[made])
    assert not reachable(lab_laptop.sim, node["PublicIpAddress"], 22)
    allow(lab_laptop, made, tcp(22))
    lab_laptop.login(node)
    lab_laptop.terminate(node["InstanceId"])
    stacks.delete_stack(StackName="bad")


def test_rejected_ruleset_keeps_the_previous_one(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := unavailable_reason():
        cannot(why)
    tools, real = tmp_path_factory.mktemp("tools"), shutil.which("nft")
    (tools / "nft").write_text(f'#!/bin/sh\n[ -e "{tools}/broken" ] && exit 1\nexec {real} "$@"\n')
    (tools / "nft").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    laptop = LabLaptop(control.start(home, nodes="namespace"), "key")
    (node,) = laptop.launch(1)
    laptop.login(node)
    (tools / "broken").touch()
    ids = [instance["InstanceId"] for instance in laptop.run(1)]
    log = home / "sim" / "server.log"
    until(lambda: "the firewall is unchanged" in log.read_text())
    assert laptop.describe(*ids)
    assert reachable(laptop.sim, node["PublicIpAddress"], 22)
    (tools / "broken").unlink()
    (after,) = laptop.launch(1)
    laptop.login(after)


JOB = (
    "import os, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "dist.barrier()\n"
    "print('all of', dist.get_world_size(), 'are here', flush=True)\n"
    "os._exit(0)\n"
)


def start_job(lab_laptop: LabLaptop, nodes: list[dict[str, Any]]) -> None:
    """Start torchrun with one rank per node, its output in the file `log` and its pid in `agent`."""
    for node in nodes:
        agent = (
            "GLOO_SOCKET_IFNAME=ens5 OMP_NUM_THREADS=1 nohup /opt/pytorch/bin/python -m "
            "torch.distributed.run --nnodes=2"
            " --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=j "
            f"--rdzv-endpoint={nodes[0]['PrivateIpAddress']}:29500"
            f" --local-addr={node['PrivateIpAddress']} job.py > log 2>&1 & echo $! > agent"
        )
        shell(lab_laptop.login(node), f"cat > job.py <<'E'\n{JOB}E\n{agent}")


def state(lab_laptop: LabLaptop, node: dict[str, Any]) -> str:
    """Return `runs` or `ended`, followed by the output of the torchrun agent."""
    return shell(lab_laptop.login(node), "kill -0 $(cat agent) 2>&- && echo runs || echo ended; cat log")


@pytest.mark.torch
def test_job_without_network_path_fails_on_the_second_node(
    lab_laptop: LabLaptop,
) -> None:
    """PyTorch's own timeout of 60 seconds, as on AWS with a group that has no self-referencing rule."""
    pytest.importorskip("torch")
    nodes = lab_laptop.launch(2, SecurityGroupIds=[lab_laptop.make_group("no way", itself=False)])
    start_job(lab_laptop, nodes)
    until(lambda: state(lab_laptop, nodes[1]).startswith("ended"), 200)
    assert "timed out after 60000ms" in state(lab_laptop, nodes[1])
    assert state(lab_laptop, nodes[0]) == "runs"  # it waits silently for 15 minutes


@pytest.mark.torch
def test_job_with_one_open_port_hangs_until_the_rule_exists(lab_laptop: LabLaptop) -> None:
    pytest.importorskip("torch")
    group = lab_laptop.make_group("only 29500", itself=False)
    peers = [{"GroupId": group}]
    allow(
        lab_laptop,
        group,
        {"IpProtocol": "tcp", "FromPort": 29500, "ToPort": 29500, "UserIdGroupPairs": peers},
    )
    nodes = lab_laptop.launch(2, SecurityGroupIds=[group])
    start_job(lab_laptop, nodes)
    time.sleep(12)  # a job that can start ends earlier
    assert [state(lab_laptop, node) for node in nodes] == ["runs", "runs"]
    allow(lab_laptop, group, {"IpProtocol": "-1", "UserIdGroupPairs": peers})
    for node in nodes:
        until(lambda node=node: "all of 2 are here" in state(lab_laptop, node), 90)
