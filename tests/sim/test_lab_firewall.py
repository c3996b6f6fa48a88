"""The lab's firewall: security groups hold as EC2's do, for what is sent as for what is received."""

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
from account import refused
from harness import cannot
from lab import LabLaptop, attempt, call, obstacle, reachable, serve, shell
from simlab import until

from cloudddp.sim import control, kernel

ANYONE = [{"CidrIp": "0.0.0.0/0"}]
EVERYTHING = {"IpProtocol": "-1", "IpRanges": ANYONE}


def tcp(port: int, *, cidr: str = "0.0.0.0/0") -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [{"CidrIp": cidr}]}


def allow(laptop: LabLaptop, group: str, rule: dict[str, Any]) -> None:
    laptop.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])


def call_from_inside(laptop: LabLaptop, node: Any, address: str, port: int = 4000) -> str:
    """What is heard on the node's network, for nodes that SSH does not reach; or how the call fails."""
    shown = next(one for one in control.nodes(laptop.sim) if one["instance_id"] == node["InstanceId"])
    with kernel.within(Path(f"/proc/{shown['home'].split('/')[2]}/ns/net")):
        try:
            with socket.create_connection((address, port), timeout=1.5) as connection:
                return connection.recv(99).decode()
        except OSError as error:
            return str(error)


def make_vpc(laptop: LabLaptop, network: str) -> tuple[str, str, str]:
    """A VPC with a subnet and a group in it that lets nobody in; their ids."""
    vpc = laptop.ec2.create_vpc(CidrBlock=network)["Vpc"]["VpcId"]
    block = str(next(ipaddress.ip_network(network).subnets(new_prefix=20)))
    request = {"VpcId": vpc, "CidrBlock": block, "AvailabilityZone": f"{laptop.sim.region}a"}
    subnet = laptop.ec2.create_subnet(**request)["Subnet"]["SubnetId"]
    group = laptop.ec2.create_security_group(GroupName="there", Description="d", VpcId=vpc)["GroupId"]
    return vpc, subnet, group


def drop_vpc(laptop: LabLaptop, vpc: str, subnet: str, group: str) -> None:
    laptop.ec2.delete_security_group(GroupId=group)
    laptop.ec2.delete_subnet(SubnetId=subnet)
    laptop.ec2.delete_vpc(VpcId=vpc)


def on(subnet: str, *groups: str) -> dict[str, Any]:
    """An interface with a public address."""
    wanted = {"DeviceIndex": 0, "SubnetId": subnet, "AssociatePublicIpAddress": True}
    return {**wanted, "Groups": list(groups)} if groups else wanted


def test_without_a_rule_nobody_comes_in_and_a_rule_holds_as_soon_as_it_is_made(resident: LabLaptop) -> None:
    shut = resident.make_group("shut", itself=False, ssh=False)
    (node,) = resident.launch(1, SecurityGroupIds=[shut])
    address = node["PublicIpAddress"]
    assert not reachable(resident.sim, address, 22)
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    elsewhere = {**ssh, "IpRanges": [{"CidrIp": "192.0.2.0/24"}]}
    resident.ec2.authorize_security_group_ingress(GroupId=shut, IpPermissions=[elsewhere])
    assert not reachable(resident.sim, address, 22)
    here = {**ssh, "IpRanges": [{"CidrIp": "203.0.113.10/32"}]}
    resident.ec2.authorize_security_group_ingress(GroupId=shut, IpPermissions=[here])
    assert until(lambda: reachable(resident.sim, address, 22))
    resident.ec2.revoke_security_group_ingress(GroupId=shut, IpPermissions=[here])
    assert not reachable(resident.sim, address, 22)


def test_without_the_rule_for_itself_members_of_a_group_do_not_hear_each_other(resident: LabLaptop) -> None:
    alone = resident.make_group("alone", itself=False)
    first, second = resident.launch(2, SecurityGroupIds=[alone])
    serve(resident.login(second))
    assert call(resident, first, second["PrivateIpAddress"], seconds=1) == ""
    rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": alone}]}]
    resident.ec2.authorize_security_group_ingress(GroupId=alone, IpPermissions=rule)
    until(lambda: call(resident, first, second["PrivateIpAddress"]) == first["PrivateIpAddress"])
    assert call(resident, first, second["PublicIpAddress"]) == ""  # a group is known by private addresses


def test_egress_rules_hold_and_name_what_was_called(resident: LabLaptop) -> None:
    shut = resident.make_group("may not send")
    resident.ec2.revoke_security_group_egress(GroupId=shut, IpPermissions=[EVERYTHING])
    (node,) = resident.launch(1, SecurityGroupIds=[shut])
    (peer,) = resident.launch(1, SecurityGroupIds=[resident.group])
    allow(resident, resident.group, tcp(4000))
    serve(resident.login(peer))
    private, public = peer["PrivateIpAddress"], peer["PublicIpAddress"]

    def heard(address: str) -> str:
        return call(resident, node, address, seconds=1)

    assert [heard(private), heard(public)] == ["", ""]
    for allowed, address, expected, other in (
        (f"{private}/32", private, node["PrivateIpAddress"], public),
        (f"{public}/32", public, node["PublicIpAddress"], private),
    ):
        rule = [tcp(4000, cidr=allowed)]
        resident.ec2.authorize_security_group_egress(GroupId=shut, IpPermissions=rule)
        until(lambda address=address, expected=expected: heard(address) == expected)
        assert heard(other) == ""
        resident.ec2.revoke_security_group_egress(GroupId=shut, IpPermissions=rule)
    itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": resident.group}]}]
    resident.ec2.authorize_security_group_egress(GroupId=shut, IpPermissions=itself)
    until(lambda: heard(private) == node["PrivateIpAddress"])
    assert heard(public) == ""
    resident.ec2.revoke_security_group_egress(GroupId=shut, IpPermissions=itself)


def test_a_node_without_a_public_address_reaches_private_ones_only(resident: LabLaptop) -> None:
    interface = {"DeviceIndex": 0, "Groups": [resident.group], "AssociatePublicIpAddress": False}
    (node,) = resident.launch(1, NetworkInterfaces=[interface])
    (peer,) = resident.launch(1)
    allow(resident, resident.group, tcp(4000))
    assert "PublicIpAddress" not in node
    serve(resident.login(peer))
    until(lambda: call_from_inside(resident, node, peer["PrivateIpAddress"]) == node["PrivateIpAddress"])
    assert call_from_inside(resident, node, peer["PublicIpAddress"]) == "timed out"


def test_an_address_that_nobody_has_is_silent(resident: LabLaptop) -> None:
    (node,) = resident.launch(1)
    for address in ("8.8.8.8", "172.31.255.250", "10.1.2.3", "198.51.100.254", "203.0.113.77"):
        assert call_from_inside(resident, node, address) == "timed out"


def test_a_node_cannot_send_with_the_address_of_another(resident: LabLaptop) -> None:
    friends = resident.make_group("friends")
    listener, friend = resident.launch(2, SecurityGroupIds=[friends])
    (stranger,) = resident.launch(1)
    hears = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 5000)); print('up', flush=True)\n"
        "while True: print(s.recv(99).decode(), flush=True)"
    )
    ears = resident.login(listener)
    shell(ears, f'nohup python3 -c "{hears}" > heard 2>&1 & until grep -q up heard; do sleep 0.05; done')
    for node, word in ((stranger, "borrowed"), (friend, "own")):
        # The header is written by hand, which every node's root may do; the kernel adds what is left at 0.
        says = (
            "import socket, struct; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW); "
            f"a, b = map(socket.inet_aton, ('{friend['PrivateIpAddress']}', '{listener['PrivateIpAddress']}')); "
            f"u = struct.pack('!HHHH', 5001, 5000, 8 + {len(word)}, 0) + b'{word}'; "
            "s.sendto(struct.pack('!BBHHHBBH4s4s', 69, 0, 20 + len(u), 0, 0, 64, 17, 0, a, b) + u, "
            f"('{listener['PrivateIpAddress']}', 0))"
        )
        shell(resident.login(node), f'sudo /opt/pytorch/bin/python -c "{says}"')
    until(lambda: "own" in shell(ears, "cat heard"))
    assert "borrowed" not in shell(ears, "cat heard")


def test_icmp_is_let_through_by_type_and_code(resident: LabLaptop) -> None:
    group = resident.make_group("pinged", itself=False)
    first, second = resident.launch(2, SecurityGroupIds=[group])
    echo = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); s.settimeout(1); "
        f"s.sendto(bytes([8, 0, 0xf7, 0xff, 0, 0, 0, 0]), ('{second['PrivateIpAddress']}', 0)); "
        "print('heard', s.recv(99)[20])"
    )
    client = resident.login(first)

    def answer() -> str:
        return attempt(client, f'sudo /opt/pytorch/bin/python -c "{echo}"').out.decode().strip()

    assert answer() == ""
    for kind, code, expected in ((3, -1, ""), (8, 1, ""), (8, 0, "heard 0")):
        rule = {"IpProtocol": "icmp", "FromPort": kind, "ToPort": code, "IpRanges": ANYONE}
        allow(resident, group, rule)
        assert (until(answer) if expected else answer()) == expected


def test_the_default_group_lets_its_members_hear_each_other_and_nobody_else_in(resident: LabLaptop) -> None:
    vpc, subnet, group = make_vpc(resident, "10.7.0.0/16")
    nodes = resident.launch(2, NetworkInterfaces=[on(subnet)])
    address = nodes[1]["PrivateIpAddress"]
    until(lambda: call_from_inside(resident, nodes[0], address, 22).startswith("SSH-2.0"))
    assert not reachable(resident.sim, nodes[0]["PublicIpAddress"], 22)
    resident.terminate(*(node["InstanceId"] for node in nodes))
    drop_vpc(resident, vpc, subnet, group)


def test_vpcs_are_apart_even_where_they_overlap(resident: LabLaptop) -> None:
    vpc, subnet, group = make_vpc(resident, "172.31.0.0/16")
    allow(resident, group, EVERYTHING)
    allow(resident, resident.group, tcp(4000))
    (ours,) = resident.launch(1)
    (theirs,) = resident.launch(1, NetworkInterfaces=[on(subnet, group)])
    assert ours["PrivateIpAddress"] != theirs["PrivateIpAddress"]
    for node in (ours, theirs):
        serve(resident.login(node))
    for caller, called in ((ours, theirs), (theirs, ours)):
        assert call(resident, caller, called["PrivateIpAddress"], seconds=1) == ""
        until(
            lambda caller=caller, called=called: (
                call(resident, caller, called["PublicIpAddress"]) == caller["PublicIpAddress"]
            )
        )
    with refused("InvalidIPAddress.InUse"):
        resident.run(
            1, NetworkInterfaces=[{**on(subnet, group), "PrivateIpAddress": ours["PrivateIpAddress"]}]
        )
    resident.terminate(theirs["InstanceId"])
    drop_vpc(resident, vpc, subnet, group)


def test_a_rule_that_makes_no_sense_lets_nobody_through_and_keeps_no_other_from_holding(
    resident: LabLaptop,
) -> None:
    bad = {"IpProtocol": "warp", "FromPort": 1, "ToPort": 2, "CidrIp": "0.0.0.0/0"}  # checked by nobody there
    group = {
        "Type": "AWS::EC2::SecurityGroup",
        "Properties": {"GroupDescription": "d", "SecurityGroupIngress": [bad]},
    }
    stacks = resident.client("cloudformation")
    stacks.create_stack(StackName="bad", TemplateBody=json.dumps({"Resources": {"Bad": group}}))
    made = stacks.describe_stack_resources(StackName="bad")["StackResources"][0]["PhysicalResourceId"]
    (node,) = resident.launch(1, SecurityGroupIds=[made])
    assert not reachable(resident.sim, node["PublicIpAddress"], 22)
    allow(resident, made, tcp(22))
    resident.login(node)
    resident.terminate(node["InstanceId"])
    stacks.delete_stack(StackName="bad")


def test_rules_that_cannot_be_put_into_force_fail_no_call_and_the_last_good_ones_hold(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := obstacle():
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
    until(lambda: "the firewall stays as it was" in log.read_text())
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


def start_job(resident: LabLaptop, nodes: list[dict[str, Any]]) -> None:
    """torchrun with one rank on each node, its output in the file `log` and its pid in `agent`."""
    for node in nodes:
        agent = (
            "GLOO_SOCKET_IFNAME=ens5 OMP_NUM_THREADS=1 nohup /opt/pytorch/bin/python -m torch.distributed.run --nnodes=2"
            f" --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=j --rdzv-endpoint={nodes[0]['PrivateIpAddress']}:29500"
            f" --local-addr={node['PrivateIpAddress']} job.py > log 2>&1 & echo $! > agent"
        )
        shell(resident.login(node), f"cat > job.py <<'E'\n{JOB}E\n{agent}")


def state(resident: LabLaptop, node: dict[str, Any]) -> str:
    """`runs` or `ended`, then what the agent has printed."""
    return shell(resident.login(node), "kill -0 $(cat agent) 2>&- && echo runs || echo ended; cat log")


@pytest.mark.torch
def test_a_job_without_a_way_between_its_nodes_fails_on_the_second_after_a_minute(
    resident: LabLaptop,
) -> None:
    """PyTorch's own 60 seconds: what a user meets on AWS whose group has no rule for itself."""
    pytest.importorskip("torch")
    nodes = resident.launch(2, SecurityGroupIds=[resident.make_group("no way", itself=False)])
    start_job(resident, nodes)
    until(lambda: state(resident, nodes[1]).startswith("ended"), 200)
    assert "timed out after 60000ms" in state(resident, nodes[1])
    assert state(resident, nodes[0]) == "runs"  # and waits, without a word, for its 15 minutes


@pytest.mark.torch
def test_a_job_hangs_silently_with_one_port_open_and_goes_on_when_the_rule_comes(resident: LabLaptop) -> None:
    pytest.importorskip("torch")
    group = resident.make_group("only 29500", itself=False)
    peers = [{"GroupId": group}]
    allow(
        resident,
        group,
        {"IpProtocol": "tcp", "FromPort": 29500, "ToPort": 29500, "UserIdGroupPairs": peers},
    )
    nodes = resident.launch(2, SecurityGroupIds=[group])
    start_job(resident, nodes)
    time.sleep(12)  # long enough for a job that can start to be over
    assert [state(resident, node) for node in nodes] == ["runs", "runs"]
    allow(resident, group, {"IpProtocol": "-1", "UserIdGroupPairs": peers})
    for node in nodes:
        until(lambda node=node: "all of 2 are here" in state(resident, node), 90)
