"""The simulator's own pages, /_cloudddp/...: what is there, where a caller stands, and what is to go wrong.

    GET  health     "ok"
    GET  address    the caller's address as the nodes see it
    GET  nodes      control.nodes
    POST fault      {"kind": "cut", "nodes": ["i-..."]}; see FAULTS
    POST interrupt  {"node": "i-...", "seconds": 120}

Answers are JSON; a 400 carries {"error": "..."} for what the caller got wrong.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.sim import groups
from cloudddp.sim.ground import Ground
from cloudddp.sim.lifecycle import Lifecycle
from cloudddp.sim.metadata import Notice
from cloudddp.sim.router import Policy

Answer = tuple[str, str, str]  # status, content type, text

FAULTS = {
    "kill": "the machine fails: no last word, the instance is terminated by EC2",
    "cut": "nothing gets to the node or from it",
    "cut-between": "nothing gets from one node to the other, or back",
    "freeze": "every process stands still; connections stay open and are not answered",
    "fill-disk": "no space is left on the node's disk",
    "slow-ssh": "SSH crawls",
    "drop-ssh": "SSH packets are lost; everything else gets through",
    "heal": "ends every fault of the node but kill",
}


class Wrong(Exception):
    """What the caller asked for cannot be; the message says why, and what there is."""


class Pages:
    """Answers the pages, and keeps the lab's firewall in step with the security groups."""

    def __init__(self, standing: Ground, lifecycle: Lifecycle) -> None:
        self._ground = standing
        self._lifecycle = lifecycle
        self._policy: Policy | None = None
        self._lock = threading.Lock()
        self.notices: dict[str, Notice] = {}  # of spot instances that will be taken back
        lifecycle.changed = self.settle

    def answer(self, page: str, environ: dict[str, Any]) -> Answer:
        get: dict[str, Callable[[], Answer]] = {
            "health": lambda: _text("ok\n"),
            "address": lambda: _text(f"{self._ground.caller or environ['REMOTE_ADDR']}\n"),
            "nodes": lambda: _json(self._lifecycle.describe()),
        }
        post: dict[str, Callable[[dict[str, Any]], Any]] = {
            "fault": self._fault,
            "interrupt": self._interrupt,
        }
        try:
            if environ["REQUEST_METHOD"] == "POST" and page in post:
                return _json(post[page](_body(environ)))
            if environ["REQUEST_METHOD"] == "GET" and page in get:
                return get[page]()
        except Wrong as wrong:
            return "400 Bad Request", "application/json", json.dumps({"error": str(wrong)})
        return "404 Not Found", "text/plain", "no such page\n"

    def settle(self) -> None:
        """Bring the firewall in step with the instances and groups there are now.

        Fails no call: it comes after the call's effect, and an answer must follow. Rules that cannot be put into force
        are written to the log, and the last good ones hold.
        """
        router = self._ground.router
        if router is None:
            return
        with self._lock:
            wanted = groups.policy(self._lifecycle.live())
            if wanted == self._policy:
                return
            try:
                router.apply(wanted)
            except OSError as error:
                print(f"the firewall stays as it was: {error}", file=sys.stderr, flush=True)
                return
            self._policy = wanted

    # -- what is to go wrong -------------------------------------------------------------------------------

    def _fault(self, asked: dict[str, Any]) -> dict[str, Any]:
        kind = asked.get("kind")
        if kind not in FAULTS:
            raise Wrong(f"there is no fault {kind!r}; faults: {', '.join(FAULTS)}")
        names = asked.get("nodes", [])
        if len(names) != (2 if kind == "cut-between" else 1):
            raise Wrong(f"{kind} is for {'two nodes' if kind == 'cut-between' else 'one node'}")
        found = [self._find(name) for name in names]
        if len({node["instance_id"] for node in found}) != len(found):
            raise Wrong("a node cannot be cut off from itself")
        try:
            self._break(kind, found)
        except (AttributeError, ValueError) as error:
            if isinstance(error, AttributeError):
                raise Wrong(
                    f"{kind} needs namespace nodes, and these are processes: {self._ground.why}"
                ) from None
            raise Wrong(str(error)) from None
        return {"kind": kind, "nodes": [node["instance_id"] for node in found]}

    def _break(self, kind: str, found: list[dict[str, Any]]) -> None:
        nodes, instance = self._ground.nodes, found[0]["instance_id"]
        acts: dict[str, Callable[[], None]] = {
            "kill": lambda: nodes.kill(instance),
            "freeze": lambda: nodes.freeze(instance),
            "fill-disk": lambda: nodes.fill(instance),
        }
        if kind in acts:
            acts[kind]()
            return
        if kind == "heal":
            nodes.thaw(instance)
            if self._ground.router is None:
                return
            nodes.drain(instance)
        router = self._ground.router
        if router is None:
            raise AttributeError("router")
        faults, address = router.faults, found[0]["private_ip"]
        changes: dict[str, Callable[[], None]] = {
            "cut": lambda: faults.cut.add(address),
            "cut-between": lambda: faults.cut_pairs.add(frozenset(node["private_ip"] for node in found)),
            "slow-ssh": lambda: faults.slow_ssh.add(address),
            "drop-ssh": lambda: faults.no_ssh.add(address),
            "heal": lambda: faults.forget(address),
        }
        changes[kind]()
        router.apply()

    def _interrupt(self, asked: dict[str, Any]) -> dict[str, Any]:
        node = self._find(asked.get("node"))
        instance = self._lifecycle.instance(node["instance_id"])
        if instance.lifecycle != "spot":
            raise Wrong(f"{instance.id} is no spot instance")
        if instance.id in self.notices:
            raise Wrong(
                f"{instance.id} has had its notice: it ends at {self.notices[instance.id].ends:%H:%M:%S} UTC"
            )
        seconds = asked.get("seconds", 120)
        if not isinstance(seconds, (int, float)) or not 0 <= seconds <= 86400:
            raise Wrong(f"seconds are a number from 0 to 86400, not {seconds!r}")
        now = datetime.now(UTC)
        at = now + timedelta(seconds=seconds)
        self.notices[instance.id] = Notice(now, at)
        timer = threading.Timer(seconds, self._lifecycle.interrupt, (instance.id,))
        timer.daemon = True
        timer.start()
        return {"node": instance.id, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def _find(self, name: Any) -> dict[str, Any]:
        """A node by its instance id, a unique beginning of it, its private or public address, or its rank."""
        nodes = sorted(self._lifecycle.describe(), key=lambda node: str(node["private_ip"]))
        exact = [
            n
            for rank, n in enumerate(nodes)
            if name in (n["instance_id"], n["private_ip"], n["public_ip"], str(rank))
        ]
        found = exact or [n for n in nodes if name and str(n["instance_id"]).startswith(str(name))]
        if len(found) != 1:
            known = ", ".join(f"{rank} ({n['instance_id']})" for rank, n in enumerate(nodes)) or "none"
            raise Wrong(f"there is no single node {name!r}; nodes: {known}")
        return dict(found[0])


def _body(environ: dict[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    except ValueError as error:
        raise Wrong(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Wrong("the body is no JSON object")
    return found


def _json(value: Any) -> Answer:
    return "200 OK", "application/json", json.dumps(value)


def _text(text: str) -> Answer:
    return "200 OK", "text/plain", text
