"""The caller: its identity, the regions that its account has enabled, and the address from which its SSH
connections come: its own, or that of a jump host in the account. Read-only.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import socket
import urllib.request
from collections.abc import Mapping
from typing import Any

from msgspec import field

from cloudddp.aws.answers import Address, Answer, Id
from cloudddp.aws.client import AWS
from cloudddp.errors import CloudDDPError
from cloudddp.text import one_line

UNKNOWN_OWNER = "unknown"  # if STS returns no ARN
CHECKIP = "https://checkip.amazonaws.com"

# A role assumed without a session name: botocore and the SDKs generate a new name for each session.
_GENERATED = re.compile(r"(assumed-role/[^/]+)/(?:botocore-session|aws-sdk-[a-z-]+|aws-go-sdk)-[0-9]+")


class _Region(Answer, frozen=True):
    region_name: Id


def enabled_regions(aws: AWS) -> list[str]:
    """Return the regions that are enabled in the account, of the partition of `aws`. One AWS call."""
    return [one.region_name for one in aws.listed("describe_regions", _Region)]


def owner(aws: AWS) -> str:
    """Return the caller's identity in the form of the owner tag: the last part of the ARN, the same in every
    session."""
    return owner_of(aws.call("sts", "get_caller_identity"))


def owner_of(identity: Mapping[str, Any]) -> str:
    """Return the owner for an answer of GetCallerIdentity."""
    arn = str(identity.get("Arn", ""))
    found = one_line(arn.rsplit(":", 1)[-1])[:200]
    generated = _GENERATED.fullmatch(found)
    return (generated.group(1) if generated else found) or UNKNOWN_OWNER


def caller_block() -> str:
    """Return this computer's IPv4 address as AWS sees it, as a /32 block.

    Nodes have IPv4 addresses only, so the service is asked over IPv4: the IPv6 address that it would see
    otherwise says nothing about the address from which SSH comes. CLOUDDDP_CHECKIP_URL selects another
    service that returns the caller's address as text. Raises CloudDDPError.
    """
    url = os.environ.get("CLOUDDDP_CHECKIP_URL", CHECKIP)
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not an http or https URL")
        with _opener().open(url, timeout=10) as answer:
            address = ipaddress.ip_address(answer.read(100).decode().strip())
        if address.version != 4:
            raise ValueError(
                f"it answers with an IPv6 address ({address}), and nodes have IPv4 addresses only"
            )
    except (OSError, ValueError) as error:
        raise CloudDDPError(
            f"cannot find the address of this computer: {url}: {error}",
            hint="give it: --ssh-from 203.0.113.7/32 (or ssh_from in cloudddp.toml)",
        ) from None
    return f"{address}/{address.max_prefixlen}"


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener that connects over IPv4, without the proxy of the environment: SSH does not use it
    either."""

    any_ipv4 = ("0.0.0.0", 0)  # noqa: S104  to connect from: no IPv6 connection has such an address

    class OverIPv4(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(http.client.HTTPConnection, request, source_address=any_ipv4)

        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(http.client.HTTPSConnection, request, source_address=any_ipv4)

    return urllib.request.build_opener(urllib.request.ProxyHandler({}), OverIPv4())


_PRIVATE = [
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
]


class _Interface(Answer, frozen=True):
    public_ip: str = field(name="Association.PublicIp", default="")
    private_ip_address: Address = ""


class _Instance(Answer, frozen=True):
    network_interfaces: tuple[_Interface, ...] = ()
    private_ip_address: Address = ""


class _Reservation(Answer, frozen=True):
    instances: list[_Instance]


def jump_host_address(aws: AWS, host: str) -> str | None:
    """Return the address under which nodes of the VPC see a jump host, or None if no instance has its
    address.

    One AWS call. Connections inside a VPC, also between peered ones, come from private addresses.
    """
    for address in _resolve(host):
        public = not any(ipaddress.ip_address(address) in block for block in _PRIVATE)
        name = "ip-address" if public else "private-ip-address"
        filters = [{"Name": name, "Values": [address]}]
        found = aws.listed("describe_instances", _Reservation, key="Reservations", Filters=filters)
        for instance in (one for reservation in found for one in reservation.instances):
            for interface in instance.network_interfaces:
                if interface.public_ip == address and interface.private_ip_address:
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
