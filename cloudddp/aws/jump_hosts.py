"""Which private address a jump host has, if it is an EC2 instance of the account. Read-only."""

from __future__ import annotations

import ipaddress
import socket

from cloudddp.aws.answers import Address, Record
from cloudddp.aws.client import AWS

_PRIVATE = [
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
]


class _PublicAddress(Record, frozen=True):
    public_ip: str = ""


class _Interface(Record, frozen=True):
    association: _PublicAddress = _PublicAddress()
    private_ip_address: Address = ""


class _Instance(Record, frozen=True):
    network_interfaces: tuple[_Interface, ...] = ()
    private_ip_address: Address = ""


class _Reservation(Record, frozen=True):
    instances: list[_Instance]


def private_address(aws: AWS, host: str) -> str | None:
    """Return the address under which nodes of the VPC see a jump host, or None if no instance has its
    address.

    One AWS call. Connections inside a VPC, also between peered ones, come from private addresses.
    """
    for address in _resolve(host):
        public = not any(ipaddress.ip_address(address) in block for block in _PRIVATE)
        name = "ip-address" if public else "private-ip-address"
        filters = [{"Name": name, "Values": [address]}]
        found = aws.listed("ec2", "describe_instances", "Reservations", _Reservation, Filters=filters)
        for instance in (one for reservation in found for one in reservation.instances):
            for interface in instance.network_interfaces:
                if interface.association.public_ip == address and interface.private_ip_address:
                    return interface.private_ip_address
            if instance.private_ip_address:
                return instance.private_ip_address
    return None


def _resolve(host: str) -> list[str]:
    """Return the IPv4 address of a name; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(found[0][4][0])] if found else []
