"""Requests to the simulator's admin API, /_cloudddp/... (see api/admin_api.py)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.simulator.control.record import Simulator

_TIMEOUT = 10  # seconds


def fault(sim: Simulator, kind: str, nodes: Sequence[str], *, cluster: str | None = None) -> dict[str, Any]:
    """Inject a fault (see api/faults.py); ranks refer to `cluster`.

    Returns kind, nodes (instance ids) and healed (the faults that `heal` ended). Raises UsageError for an
    unknown fault or node.
    """
    return _post(sim, "fault", {"kind": kind, "nodes": list(nodes), "cluster": cluster})


def interrupt(sim: Simulator, node: str, *, seconds: float, cluster: str | None = None) -> dict[str, Any]:
    """Give a spot node its interruption notice, and terminate it after `seconds`. Raises UsageError."""
    return _post(sim, "interrupt", {"node": node, "seconds": seconds, "cluster": cluster})


def maintenance(
    sim: Simulator, node: str, *, seconds: float, code: str, cluster: str | None = None
) -> dict[str, Any]:
    """Schedule maintenance of a node in `seconds`; see ec2/instance_status.py for the codes. Raises
    UsageError.
    """
    return _post(sim, "maintenance", {"node": node, "seconds": seconds, "code": code, "cluster": cluster})


def conditions(sim: Simulator, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change the account's conditions (see conditions/model.py). Returns all of them. Raises UsageError."""
    return _post(sim, "conditions", changes)


def permissions(sim: Simulator) -> dict[str, dict[str, int]]:
    """Return access key -> permission, such as ec2:CreateTags -> how many calls needed it. Raises
    CloudDDPError.
    """
    return {key: dict(counts) for key, counts in _read(sim, "permissions").items()}


def nodes(sim: Simulator) -> list[dict[str, Any]]:
    """Return a record for each instance that is not terminated, by cluster and rank. Raises CloudDDPError.

    Keys: cluster (a name, or None), rank (or None), instance_id, state, private_ip, public_ip, ssh_port,
    home, deadline (ISO 8601, UTC, or None), processes (pids), faults (those in effect, named as for `fault`;
    `cut-between ID`), interruption (when a spot node will be terminated, ISO 8601, UTC, or None).
    """
    return [dict(node) for node in _read(sim, "nodes")]


def is_healthy(sim: Simulator) -> bool:
    try:
        return get(f"{sim.endpoint}/_cloudddp/health") == b"ok\n"
    except OSError:
        return False


def get(url: str | urllib.request.Request) -> bytes:
    # No proxy, even if the environment sets one: the address is a loopback address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_TIMEOUT) as response:
        return bytes(response.read())


def _read(sim: Simulator, page: str) -> Any:
    try:
        return json.loads(get(f"{sim.endpoint}/_cloudddp/{page}"))
    except (OSError, ValueError) as error:
        raise CloudDDPError(
            f"the simulator at {sim.endpoint} does not respond: {error}",
            hint="cloudddp sim stop, then start it",
        ) from error


def _post(sim: Simulator, page: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310  the endpoint is the simulator's
        f"{sim.endpoint}/_cloudddp/{page}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        return dict(json.loads(get(request)))
    except urllib.error.HTTPError as error:
        raise _refused(error) from None
    except (OSError, ValueError) as error:
        raise CloudDDPError(f"the simulator at {sim.endpoint} does not respond: {error}") from error


def _refused(error: urllib.error.HTTPError) -> CloudDDPError:
    try:
        answer = dict(json.loads(error.read()))
    except ValueError:  # not an answer of the admin API
        return CloudDDPError(
            f"the simulator failed: {error}", hint="its log is sim/server.log of CLOUDDDP_HOME"
        )
    return UsageError(str(answer.get("error", error)), hint=str(answer.get("hint", "")))
