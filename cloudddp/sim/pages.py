"""The simulator's own pages, /_cloudddp/...: what is there, where a caller stands, and what is to go wrong.

    GET  health     "ok"
    GET  address    the caller's address as the nodes see it
    GET  nodes      control.nodes
    POST fault      {"kind": "cut", "nodes": ["i-..."], "cluster": null}; see FAULTS
    POST interrupt  {"node": "i-...", "cluster": null, "seconds": 120}

A node is named as roster.py has it; `cluster` says whose ranks are meant. Answers are JSON; a 400 carries
{"error": "...", "hint": "..."} for what the caller got wrong.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.sim import groups, roster
from cloudddp.sim.ground import Ground
from cloudddp.sim.guest import log
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


ANYWHERE = ("kill", "freeze", "heal")  # faults that process nodes can have, too
_TIME = "%Y-%m-%dT%H:%M:%SZ"


class Wrong(Exception):
    """What the caller asked for cannot be; the message says why, and what there is."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Pages:
    """Answers the pages, and keeps the lab's firewall in step with the security groups."""

    def __init__(self, standing: Ground, lifecycle: Lifecycle) -> None:
        self._ground = standing
        self._lifecycle = lifecycle
        self._policy: Policy | None = None
        self._lock = threading.Lock()
        self.notices: dict[str, Notice] = {}  # of spot instances that will be taken back
        # By instance id, the home that was frozen: a node that has booted again has another one.
        self._frozen: dict[str, str] = {}
        self._full: set[str] = set()
        lifecycle.changed = self.settle

    def answer(self, page: str, environ: dict[str, Any]) -> Answer:
        get: dict[str, Callable[[], Answer]] = {
            "health": lambda: _text("ok\n"),
            "address": lambda: _text(f"{self._ground.caller or environ['REMOTE_ADDR']}\n"),
            "nodes": lambda: _json(self._nodes()),
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
        except (Wrong, roster.Unclear) as wrong:
            answer = {"error": str(wrong), "hint": wrong.hint}
            return "400 Bad Request", "application/json", json.dumps(answer)
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
                log.say(f"the firewall stays as it was: {error}")
                return
            self._policy = wanted

    # -- who is there ----------------------------------------------------------------------------------------

    def _nodes(self) -> list[dict[str, Any]]:
        """Every node in order of cluster and rank, with what is wrong with it; see control.nodes."""
        listed = self._lifecycle.describe()
        found = roster.ranked(
            listed, {node["instance_id"]: self._tags(node["instance_id"]) for node in listed}
        )
        ids = {node["private_ip"]: node["instance_id"] for node in found}
        for node in found:
            notice = self.notices.get(node["instance_id"])
            node["faults"] = self._faults(node, ids)
            node["interruption"] = notice.ends.strftime(_TIME) if notice else None
        return found

    def _tags(self, instance_id: str) -> dict[str, str]:
        try:
            return {tag["key"]: tag["value"] for tag in self._lifecycle.instance(instance_id).get_tags()}
        except KeyError:  # forgotten in this moment
            return {}

    def _faults(self, node: dict[str, Any], ids: dict[str, str]) -> list[str]:
        """The faults that hold on a node, by the names under which they were asked for."""
        instance, address = node["instance_id"], node["private_ip"]
        found = ["freeze"] if self._frozen.get(instance) == node["home"] else []
        found += ["fill-disk"] if instance in self._full else []
        if self._ground.router is None:
            return found
        faults = self._ground.router.faults
        found += [
            kind
            for kind, held in (
                ("cut", faults.cut),
                ("slow-ssh", faults.slow_ssh),
                ("drop-ssh", faults.no_ssh),
            )
            if address in held
        ]
        others = {other for pair in list(faults.cut_pairs) if address in pair for other in pair - {address}}
        return found + [f"cut-between {ids.get(other, other)}" for other in sorted(others)]

    def _find(self, name: object, cluster: object) -> dict[str, Any]:
        return roster.find(self._nodes(), name, None if cluster is None else str(cluster))

    # -- what is to go wrong -------------------------------------------------------------------------------

    def _fault(self, asked: dict[str, Any]) -> dict[str, Any]:
        kind = asked.get("kind")
        if kind not in FAULTS:
            raise Wrong(f"there is no fault {kind!r}; faults: {', '.join(FAULTS)}")
        names = asked.get("nodes", [])
        if not isinstance(names, list) or len(names) != (2 if kind == "cut-between" else 1):
            raise Wrong(f"{kind} is for {'two nodes' if kind == 'cut-between' else 'one node'}")
        found = [self._find(name, asked.get("cluster")) for name in names]
        if len({node["instance_id"] for node in found}) != len(found):
            raise Wrong("a node cannot be cut off from itself")
        if kind not in ANYWHERE and self._ground.router is None:
            raise Wrong(f"{kind} needs namespace nodes, and these are processes: {self._ground.why}")
        try:
            self._break(kind, found)
        except ValueError as error:
            raise Wrong(str(error)) from None
        healed = found[0]["faults"] if kind == "heal" else []
        return {"kind": kind, "nodes": [node["instance_id"] for node in found], "healed": healed}

    def _break(self, kind: str, found: list[dict[str, Any]]) -> None:
        nodes, instance = self._ground.nodes, found[0]["instance_id"]
        if kind == "kill":
            nodes.kill(instance)
        elif kind == "freeze":
            nodes.freeze(instance)
            self._frozen[instance] = found[0]["home"]
        elif kind == "fill-disk":
            nodes.fill(instance)
            self._full.add(instance)
        elif kind == "heal":
            self._heal(found[0])
        else:
            self._break_network(kind, [node["private_ip"] for node in found])

    def _heal(self, node: dict[str, Any]) -> None:
        instance, router = node["instance_id"], self._ground.router
        self._ground.nodes.thaw(instance)
        self._frozen.pop(instance, None)
        if router is None:
            return
        self._ground.nodes.drain(instance)
        self._full.discard(instance)
        router.faults.forget(node["private_ip"])
        router.apply()

    def _break_network(self, kind: str, addresses: list[str]) -> None:
        router = self._ground.router
        if router is None:
            raise ValueError(f"{kind} needs namespace nodes")
        if kind == "cut-between":
            router.faults.cut_pairs.add(frozenset(addresses))
        else:
            held = {
                "cut": router.faults.cut,
                "slow-ssh": router.faults.slow_ssh,
                "drop-ssh": router.faults.no_ssh,
            }
            held[kind].update(addresses)
        router.apply()

    def _interrupt(self, asked: dict[str, Any]) -> dict[str, Any]:
        node = self._find(asked.get("node"), asked.get("cluster"))
        instance = self._lifecycle.instance(node["instance_id"])
        if instance.lifecycle != "spot":
            raise Wrong(f"{instance.id} is no spot instance", "the nodes of a cluster made with --spot are")
        if instance.id in self.notices:
            raise Wrong(
                f"{instance.id} has had its notice: it ends at {self.notices[instance.id].ends:%H:%M:%S} UTC"
            )
        seconds = asked.get("seconds", 120)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 86400:
            raise Wrong(f"seconds are a number from 0 to 86400, not {seconds!r}")
        now = datetime.now(UTC)
        at = now + timedelta(seconds=seconds)
        self.notices[instance.id] = Notice(now, at)
        timer = threading.Timer(seconds, self._lifecycle.interrupt, (instance.id,))
        timer.daemon = True
        timer.start()
        return {"node": instance.id, "time": at.strftime(_TIME)}


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
