"""Which private address a jump host has, if it is an EC2 instance of the account. Read-only."""

from __future__ import annotations

import ipaddress
import socket

from cloudddp.aws.client import AWS

_PRIVATE = [
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
]


def private_address(aws: AWS, host: str) -> str | None:
    """Return the address under which nodes of the VPC see a jump host, or None if no instance has its address.

    One AWS call. Connections inside a VPC, also between peered ones, come from private addresses.
    """
    for address in _resolve(host):
        public = not any(ipaddress.ip_address(address) in block for block in _PRIVATE)
        name = "ip-address" if public else "private-ip-address"
        found = aws.pages(
            "ec2", "describe_instances", "Reservations", Filters=[{"Name": name, "Values": [address]}]
        )
        for reservation in found:
            for instance in reservation["Instances"]:
                for interface in instance.get("NetworkInterfaces", []):
                    if interface.get("Association", {}).get("PublicIp") == address:
                        return str(ipaddress.IPv4Address(interface["PrivateIpAddress"]))
                if instance.get("PrivateIpAddress"):
                    return str(ipaddress.IPv4Address(instance["PrivateIpAddress"]))
    return None


def _resolve(host: str) -> list[str]:
    """Return the IPv4 address of a name; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(found[0][4][0])] if found else []
