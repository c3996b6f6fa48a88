"""The instance metadata service: what 169.254.169.254 answers a node about itself, version 2 and, where allowed, 1.

Who asks is known by the address that the question comes from, which the lab's network does not let a node forge;
anybody who is not a node is hung up on. Reads moto's Instance and changes nothing. Knows no nodes and no network:
it is told how to find an instance by its address, and which spot instances have had notice.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

ADDRESS = ("169.254.169.254", 80)
LONGEST = 21600  # seconds that a token may be good for

_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105  the header's name
_VERSION = re.compile(r"latest|1\.0|\d{4}-\d\d-\d\d")
_VERSIONS = ("1.0", "2021-07-15", "latest")
_LISTING = ""  # in a tree: a folder's listing, where it is not simply its names
_IN_ALL = 10.0  # seconds for a connection, however busy it looks
_CROWD = 64  # connections of one node at a time; the others have to be heard as well
_REASONS = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
}

Headers = Mapping[str, str] | Message  # by name, in any case
Tree = dict[str, Any]  # name -> text, bytes, or another Tree


@dataclass(frozen=True, slots=True)
class Notice:
    """EC2 wants a spot instance back: when it said so, and when it takes it. Both in UTC."""

    given: datetime
    ends: datetime


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    hops: int = 64  # how far the answer's packets get


class Metadata:
    """Answers questions of instances. `find` gives moto's Instance of a private address, or None."""

    def __init__(self, find: Callable[[str], Any | None], notices: Mapping[str, Notice]) -> None:
        self._find = find
        self._notices = notices
        self._secret = secrets.token_bytes(32)

    def server(self, address: tuple[str, int] = ADDRESS) -> ThreadingHTTPServer:
        """A server bound to `address` in this process's network; it has yet to `serve_forever`. Raises OSError."""
        return _Server(address, self)

    def known(self, address: str) -> bool:
        """Whether an instance has this private address."""
        return self._find(address) is not None

    def answer(self, method: str, path: str, headers: Headers, address: str) -> _Answer | None:
        """What the instance at `address` gets; None for nobody's address."""
        instance = self._find(address)
        if instance is None:
            return None
        options = instance.metadata_options
        if options.http_endpoint == "disabled":
            return _Answer(403)
        path = unquote(path.partition("?")[0])
        if path.strip("/") == "latest/api/token":
            return (
                self._give_token(instance, headers)
                if method == "PUT"
                else _Answer(405, headers=(("Allow", "PUT"),))
            )
        if method not in ("GET", "HEAD"):
            return _Answer(405, headers=(("Allow", "GET, HEAD"),))
        token, left = headers.get(_TOKEN), 0
        if token is not None and not (left := self._left(instance, token)):
            return _Answer(401)
        if token is None and options.http_tokens == "required":
            return _Answer(401)
        found = look_up(self._tree(instance), path)
        if found is None:
            return _Answer(404)
        return _Answer(200, found, ((_TTL, str(left)),) if token is not None else ())

    def _give_token(self, instance: Any, headers: Headers) -> _Answer:
        if headers.get("X-Forwarded-For") is not None:  # an open proxy on the node must not get one
            return _Answer(403)
        asked = headers.get(_TTL) or ""
        if not asked.isdecimal() or not 1 <= int(asked) <= LONGEST:
            return _Answer(400)
        # Signed, not kept: 8 bytes of time and 32 of signature are 56 characters, as EC2's own are.
        ends = int(time.time() + int(asked)).to_bytes(8, "big")
        token = base64.urlsafe_b64encode(ends + self._sign(instance, ends))
        # It goes no further than the instance allows: by default not into a container behind a bridge.
        hops = min(max(instance.metadata_options.http_put_response_hop_limit, 1), 64)
        return _Answer(200, token, ((_TTL, asked),), hops)

    def _sign(self, instance: Any, ends: bytes) -> bytes:
        return hmac.digest(self._secret, instance.id.encode() + ends, "sha256")

    def _left(self, instance: Any, token: str) -> int:
        """How many seconds the token is still good for, for this instance; 0 where it is not."""
        try:
            raw = base64.urlsafe_b64decode(token.encode())
        except ValueError:
            return 0
        if not hmac.compare_digest(raw[8:], self._sign(instance, raw[:8])):
            return 0
        return max(0, int.from_bytes(raw[:8], "big") - int(time.time()))

    def _tree(self, instance: Any) -> Tree:
        user_data = base64.b64decode(str(instance.user_data or ""))
        return {
            "dynamic": {"instance-identity": {"document": _document(instance)}},
            "meta-data": {**_metadata(instance), **_notices(self._notices.get(instance.id))},
            **({"user-data": user_data} if user_data else {}),
        }


def look_up(tree: Tree, path: str) -> bytes | None:
    """What lies at /VERSION/... of the tree: a leaf, or the listing of a folder; None where there is nothing."""
    version, *names = [name for name in path.split("/") if name] or [""]
    if not version:
        return "\n".join(_VERSIONS).encode()
    if not _VERSION.fullmatch(version):
        return None
    here: Any = tree
    for name in names:
        if not isinstance(here, dict) or name == _LISTING or name not in here:
            return None
        here = here[name]
    if not isinstance(here, dict):
        return here if isinstance(here, bytes) else str(here).encode()
    listed = here.get(_LISTING) or "\n".join(
        f"{name}/" if isinstance(child, dict) else name for name, child in sorted(here.items())
    )
    return str(listed).encode()


def _metadata(instance: Any) -> Tree:
    """What meta-data/ holds. A name is missing where the instance has no such thing, as on EC2."""
    primary = instance.nics[0]
    tree: Tree = {
        "ami-id": instance.image_id,
        "ami-launch-index": instance.ami_launch_index,
        "ami-manifest-path": "(unknown)",
        "block-device-mapping": {"ami": instance.root_device_name, "root": instance.root_device_name},
        "events": {"maintenance": {"history": "[]", "scheduled": "[]"}},
        "hostname": instance.private_dns_name,
        "instance-action": "none",
        "instance-id": instance.id,
        "instance-life-cycle": instance.lifecycle or "on-demand",
        "instance-type": instance.instance_type,
        "local-hostname": instance.private_dns_name,
        "local-ipv4": instance.private_ip,
        "mac": primary.mac_address,
        "network": {
            "interfaces": {
                "macs": {f"{nic.mac_address}": _interface(instance, nic) for nic in instance.nics.values()}
            }
        },
        "placement": _placement(instance),
        "profile": "default-hvm",
        "reservation-id": _reservation(instance),
        "security-groups": "\n".join(group.name for group in primary.group_set),
        "services": {"domain": "amazonaws.com", "partition": "aws"},
        "system": "nitro",
    }
    if instance.public_ip:
        tree |= {"public-hostname": instance.public_dns_name, "public-ipv4": instance.public_ip}
    if key := _public_key(instance):
        tree["public-keys"] = {_LISTING: f"0={instance.key_name}", "0": {"openssh-key": key}}
    if instance.metadata_options.instance_metadata_tags == "enabled":
        tree["tags"] = {"instance": {tag["key"]: tag["value"] for tag in instance.get_tags()}}
    return tree


def _interface(instance: Any, nic: Any) -> Tree:
    groups, subnet = list(nic.group_set), nic.subnet
    vpc = instance.ec2_backend.get_vpc(subnet.vpc_id)
    tree: Tree = {
        "device-number": nic.device_index or 0,
        "interface-id": nic.id,
        "mac": nic.mac_address,
        "owner-id": instance.owner_id,
        "security-group-ids": "\n".join(group.id for group in groups),
        "security-groups": "\n".join(group.name for group in groups),
        "subnet-id": subnet.id,
        "subnet-ipv4-cidr-block": subnet.cidr_block,
        "vpc-id": subnet.vpc_id,
        "vpc-ipv4-cidr-block": vpc.cidr_block,
        "vpc-ipv4-cidr-blocks": vpc.cidr_block,
    }
    if card := getattr(nic, "network_card_index", 0):
        tree["network-card"] = card
    if nic.private_ip_address:  # an EFA-only interface has none
        tree |= {"local-hostname": instance.private_dns_name, "local-ipv4s": nic.private_ip_address}
    if nic.public_ip:
        tree |= {"public-ipv4s": nic.public_ip, "ipv4-associations": {nic.public_ip: nic.private_ip_address}}
    return tree


def _placement(instance: Any) -> Tree:
    zone = instance.availability_zone
    tree: Tree = {"availability-zone": zone, "region": instance.region_name}
    if found := instance.ec2_backend.get_zone_by_name(zone):
        tree["availability-zone-id"] = found.zone_id
    if instance.placement.group_name:
        tree["group-name"] = instance.placement.group_name
    return tree


def _reservation(instance: Any) -> str:
    reservations = list(instance.ec2_backend.reservations.values())
    return next((one.id for one in reservations if any(i.id == instance.id for i in one.instances)), "")


def _public_key(instance: Any) -> str:
    pair = instance.ec2_backend.key_pairs.get(instance.key_name)
    material = pair.material_public if pair else ""
    return (material.decode() if isinstance(material, bytes) else str(material)).strip()


def _notices(notice: Notice | None) -> Tree:
    """What a spot instance reads once EC2 wants it back; the recommendation comes with the notice here."""
    if notice is None:
        return {}
    ends = _iso(notice.ends)
    return {
        "events": {
            "maintenance": {"history": "[]", "scheduled": "[]"},
            "recommendations": {"rebalance": json.dumps({"noticeTime": _iso(notice.given)})},
        },
        "spot": {
            "instance-action": json.dumps({"action": "terminate", "time": ends}),
            "termination-time": ends,
        },
    }


def _document(instance: Any) -> str:
    """The identity document, unsigned: nobody but AWS can sign one, so the signatures beside it are missing."""
    nothing = ("billingProducts", "devpayProductCodes", "kernelId", "marketplaceProductCodes", "ramdiskId")
    known = {
        "accountId": instance.owner_id,
        "architecture": instance.architecture,
        "availabilityZone": instance.availability_zone,
        "imageId": instance.image_id,
        "instanceId": instance.id,
        "instanceType": instance.instance_type,
        "pendingTime": _iso(instance.launch_time.replace(tzinfo=UTC)),
        "privateIp": instance.private_ip,
        "region": instance.region_name,
        "version": "2017-09-30",
    }
    return json.dumps({**dict.fromkeys(nothing), **known}, sort_keys=True, indent=2)


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], metadata: Metadata) -> None:
        self.metadata = metadata
        self._open: dict[socket.socket, tuple[str, float]] = {}  # who called, and when it has to be done
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            of_this = sum(address == client_address[0] for address, _ in self._open.values())
            if of_this >= _CROWD or not self.metadata.known(client_address[0]):
                return False
            self._open[request] = (client_address[0], time.monotonic() + _IN_ALL)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called between connections, and at least twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, (_, end) in self._open.items():
                if end < now:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for the name of the address; there is none to ask in the lab.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = ADDRESS

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a caller that hangs up in the middle


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "EC2ws", ""
    timeout = _IN_ALL
    server: _Server

    def _do(self) -> None:
        self.close_connection = True
        metadata = self.server.metadata
        answer = metadata.answer(self.command, self.path, self.headers, self.client_address[0])
        if answer is None:
            return
        self.connection.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, answer.hops)
        body = answer.body if answer.status == 200 else _page(answer.status)
        self.send_response(answer.status)
        for name, value in (
            *answer.headers,
            ("Content-Type", "text/plain" if answer.status == 200 else "text/html"),
        ):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = _do  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        pass


def _page(status: int) -> bytes:
    return f"<html><head><title>{status} - {_REASONS[status]}</title></head></html>\n".encode()
