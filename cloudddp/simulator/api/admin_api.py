"""The simulator's admin API, /_cloudddp/..., for `control` and the command line.

    GET  health      "ok"
    GET  address     the caller's address as the nodes see it
    GET  nodes       see control.nodes
    GET  permissions {"access key": {"ec2:RunInstances": 1}}: how many calls needed each permission
    GET  conditions  see conditions.model
    POST conditions  see conditions.model
    POST fault       {"kind": "cut", "nodes": ["i-..."], "cluster": null}; see faults.FAULTS
    POST interrupt   {"node": "i-...", "cluster": null, "seconds": 120}
    POST maintenance {"node": "i-...", "cluster": null, "seconds": 600, "code": "instance-reboot"}

A node is named as in node_names.py; `cluster` is the one that ranks refer to. Responses are JSON; a 400 has
{"error": "...", "hint": "..."}.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.simulator.api import node_names
from cloudddp.simulator.api.authorization import Permissions
from cloudddp.simulator.api.faults import FaultInjector
from cloudddp.simulator.api.node_names import BadRequest
from cloudddp.simulator.api.wsgi import Environ, StartResponse, read_body, respond
from cloudddp.simulator.conditions.model import Link
from cloudddp.simulator.conditions.reading import InvalidCondition
from cloudddp.simulator.conditions.store import Store
from cloudddp.simulator.ec2 import instance_status
from cloudddp.simulator.hosts.host_backend import HostBackend
from cloudddp.simulator.hosts.lifecycle import Lifecycle, run_later
from cloudddp.simulator.metadata.tree import Notice

PREFIX = "/_cloudddp/"
_BOOT_OF_MACHINES = ("nologin_seconds", "ssh_socket")
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_MAX_NOTICE = 86400  # seconds


class AdminApi:
    """A WSGI application for paths that start with PREFIX."""

    def __init__(
        self, backend: HostBackend, lifecycle: Lifecycle, conditions: Store, permissions: Permissions
    ) -> None:
        self._backend = backend
        self._lifecycle = lifecycle
        self._conditions = conditions
        self._permissions = permissions
        self._faults = FaultInjector(backend)
        self._changing = threading.Lock()
        self.notices: dict[str, Notice] = {}  # by instance id, of spot instances that will be interrupted

    def serve(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        page = environ["PATH_INFO"].removeprefix(PREFIX)
        try:
            status, answer = self._route(environ["REQUEST_METHOD"], page, environ)
        except BadRequest as error:
            status, answer = 400, {"error": str(error), "hint": error.hint}
        except InvalidCondition as error:
            status, answer = 400, {"error": str(error), "known": list(error.known)}
        if isinstance(answer, str):
            return respond(start_response, status, "text/plain", answer)
        return respond(start_response, status, "application/json", json.dumps(answer))

    def _route(self, method: str, page: str, environ: Environ) -> tuple[int, Any]:
        """Return status and answer: text, or an object for JSON."""
        match method, page:
            case "GET", "health":
                return 200, "ok\n"
            case "GET", "address":
                return 200, f"{self._backend.caller or environ['REMOTE_ADDR']}\n"
            case "GET", "nodes":
                return 200, self._nodes()
            case "GET", "permissions":
                return 200, self._permissions.to_json()
            case "GET", "conditions":
                return 200, self._conditions.read().to_json()
            case "POST", "conditions":
                return 200, self._set_conditions(environ)
            case "POST", "fault":
                return 200, self._inject_fault(_json_object(environ))
            case "POST", "interrupt":
                return 200, self._interrupt(_json_object(environ))
            case "POST", "maintenance":
                return 200, self._schedule(_json_object(environ))
            case _, "conditions":
                return 405, {"error": "expected GET or POST", "known": ["GET", "POST"]}
        return 404, "not found\n"

    def _nodes(self) -> list[dict[str, Any]]:
        """Return every node by cluster and rank, with its faults; see control.nodes."""
        described = self._lifecycle.describe()
        tags = {one.id: {tag["key"]: tag["value"] for tag in one.get_tags()} for one, _ in described}
        launches = {one.id: (str(one.reservation_id), int(one.ami_launch_index)) for one, _ in described}
        nodes = node_names.ranked([node for _, node in described], tags, launches)
        addresses = {node["private_ip"]: node["instance_id"] for node in nodes}
        for node in nodes:
            notice = self.notices.get(node["instance_id"])
            node["faults"] = self._faults.of_node(node, addresses)
            node["interruption"] = notice.ends.strftime(_TIME) if notice else None
        return nodes

    def _find(self, name: object, cluster: object) -> dict[str, Any]:
        return node_names.find(self._nodes(), name, None if cluster is None else str(cluster))

    def _set_conditions(self, environ: Environ) -> dict[str, Any]:
        try:
            body = json.loads(read_body(environ) or b"null")
        except ValueError as error:
            raise InvalidCondition(f"the body is not valid JSON: {error}") from None
        self._check_boot(body)
        with self._changing:
            before = self._conditions.read()
            after = self._conditions.update(body)
            if after.laptop_link != before.laptop_link:
                self._use_link(after.laptop_link)
        return after.to_json()

    def _check_boot(self, body: Any) -> None:
        """Raise InvalidCondition for a setting of a boot that would have no effect on this kind of nodes."""
        given = body.get("boot") if isinstance(body, dict) else None
        kind = self._backend.kind
        machines = kind == "machine"
        for name, value in given.items() if isinstance(given, dict) else ():
            if value and name == "no_nfs" and kind != "process":
                raise InvalidCondition(
                    f"boot: {name} has no effect on {kind} nodes; only process nodes have it"
                )
            if value and (name not in _BOOT_OF_MACHINES if machines else name == "ssh_socket"):
                have = "these" if machines else "only machine nodes"
                known = f"have {', '.join(_BOOT_OF_MACHINES)}" if machines else "have it"
                raise InvalidCondition(
                    f"boot: {name} has no effect on {self._backend.kind} nodes; {have} {known}"
                )

    def _use_link(self, link: Link | None) -> None:
        """Put the condition `link` into effect; if that fails, there is no link."""
        try:
            if self._backend.router is not None:
                self._backend.router.link.use(link)
            elif link is not None:
                raise OSError(f"it needs nodes in the lab; these are process nodes ({self._backend.why})")
        except OSError as error:
            self._conditions.update({"link": None})
            raise InvalidCondition(f"link: {error}") from None

    def _inject_fault(self, request: dict[str, Any]) -> dict[str, Any]:
        kind, names = request.get("kind"), request.get("nodes", [])
        self._faults.check(kind, names)
        nodes = [self._find(name, request.get("cluster")) for name in names]
        healed = self._faults.inject(str(kind), nodes)
        for node in nodes:
            failing = {"freeze", "cut"}.intersection(self._faults.of_node(node, {}))
            instance_status.set_failing(self._lifecycle.instance(node["instance_id"]), bool(failing))
        return {"kind": kind, "nodes": [node["instance_id"] for node in nodes], "healed": healed}

    def _interrupt(self, request: dict[str, Any]) -> dict[str, Any]:
        node = self._find(request.get("node"), request.get("cluster"))
        instance = self._lifecycle.instance(node["instance_id"])
        if instance.lifecycle != "spot":
            raise BadRequest(
                f"{instance.id} is not a spot instance", "the nodes of a cluster created with --spot are"
            )
        if notice := self.notices.get(instance.id):
            raise BadRequest(f"{instance.id} already has its notice: it ends at {notice.ends:%H:%M:%S} UTC")
        seconds = _seconds(request, 120)
        now = datetime.now(UTC)
        ends = now + timedelta(seconds=seconds)
        self.notices[instance.id] = Notice(now, ends)
        run_later(seconds, self._lifecycle.interrupt, instance.id)
        return {"node": instance.id, "time": ends.strftime(_TIME)}

    def _schedule(self, request: dict[str, Any]) -> dict[str, Any]:
        """Schedule maintenance of a node, which then takes place."""
        node = self._find(request.get("node"), request.get("cluster"))
        instance = self._lifecycle.instance(node["instance_id"])
        code = request.get("code", "instance-reboot")
        if code not in instance_status.CODES:
            raise BadRequest(f"unknown code {code!r}", f"known: {', '.join(instance_status.CODES)}")
        seconds = _seconds(request, 600)
        begins = datetime.now(UTC) + timedelta(seconds=seconds)
        event = instance_status.ScheduledEvent.of(str(code), begins.replace(microsecond=0))
        instance_status.schedule(instance, event)
        run_later(seconds, self._lifecycle.maintain, instance.id, event)
        return {"node": instance.id, "code": code, "time": event.begins.strftime(_TIME)}


def _seconds(request: dict[str, Any], default: float) -> float:
    seconds = request.get("seconds", default)
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= _MAX_NOTICE:
        raise BadRequest(f"seconds must be a number from 0 to {_MAX_NOTICE}, not {seconds!r}")
    return float(seconds)


def _json_object(environ: Environ) -> dict[str, Any]:
    try:
        found = json.loads(read_body(environ))
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object")
    return found
