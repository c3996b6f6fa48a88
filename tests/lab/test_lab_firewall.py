"""The lab's firewall enforces security groups as EC2 does, for ingress and egress."""

from __future__ import annotations

from typing import Any

from support.account import refused
from support.harness import until
from support.labnode import LabLaptop, call, reachable, serve, shell
from support.vpcs import EVERYWHERE, Vpc

EVERYTHING = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": EVERYWHERE}]}


def tcp(port: int, *, cidr: str = "0.0.0.0/0") -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [{"CidrIp": cidr}]}


def allow(laptop: LabLaptop, group: str, rule: dict[str, Any]) -> None:
    laptop.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])


def test_ingress_needs_a_rule_which_is_effective_at_once(lab_laptop: LabLaptop) -> None:
    shut = lab_laptop.make_group("shut", itself=False, ssh=False)
    (node,) = lab_laptop.launch(1, SecurityGroupIds=[shut])
    address = node["PublicIpAddress"]
    assert not reachable(lab_laptop.sim, address, 22)
    allow(lab_laptop, shut, tcp(22, cidr="192.0.2.0/24"))
    assert not reachable(lab_laptop.sim, address, 22)
    here = tcp(22, cidr="203.0.113.10/32")
    allow(lab_laptop, shut, here)
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


def test_overlapping_vpcs_are_separate(lab_laptop: LabLaptop) -> None:
    vpc = Vpc(lab_laptop.ec2, "172.31.0.0/16")
    there = {"DeviceIndex": 0, "SubnetId": vpc.public, "AssociatePublicIpAddress": True}
    there["Groups"] = [vpc.group(EVERYWHERE)]
    allow(lab_laptop, lab_laptop.group, tcp(4000))
    (ours,) = lab_laptop.launch(1)
    (theirs,) = lab_laptop.launch(1, NetworkInterfaces=[there])
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
        lab_laptop.run(1, NetworkInterfaces=[{**there, "PrivateIpAddress": ours["PrivateIpAddress"]}])
