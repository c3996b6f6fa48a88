"""The requests that `up` sends for an instance type in an account, with made-up ids in place of AWS's."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

from cloudddp.aws.client import AWS
from cloudddp.cli.actions.rehearsal import Nodes
from cloudddp.cluster import up
from cloudddp.config.spec import ClusterSpec
from cloudddp.sim.aws import rehearse

FOLDER = Path(__file__).resolve().parents[1] / "golden"
TYPES = ("p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "g6e.12xlarge", "g5.xlarge")
_ID = re.compile(r"\b(vpc|subnet|sg|ami|key|i|rtb|c|pg|cr|eipalloc|eni)-[0-9a-f]{8,32}\b")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_HIDDEN = {"UserData": "<user data>", "ClientToken": "<token>", "PublicKeyMaterial": "<public key>"}


def requests(spec: ClusterSpec, prepare: Any = lambda _: {}) -> list[dict[str, Any]]:
    """Return every request of `up`, in order: the operation and its parameters.

    `prepare` is called with AWS before, creates what the account has, and returns settings that name it.
    """
    calls: list[tuple[str, str, Mapping[str, Any]]] = []
    with rehearse("nodes"):
        aws = AWS(
            region="us-east-1",
            observe=lambda service, method, params, _: calls.append((service, method, params)),
        )
        spec = ClusterSpec(**{**_plain(spec), **prepare(aws)})
        calls.clear()
        up.up(
            [aws],
            spec,
            progress=lambda _: None,
            dial=lambda found, *_: Nodes(found, gpus=found.gpus or 0, cpus=8),
            check_route=lambda _: None,
            ssh_sources=lambda *_: ("203.0.113.7/32",),
        )
        operations = [_operation(aws, service, method) for service, method, _ in calls]
    names = _Names()
    return [
        {"call": operation, "params": names.replace(params)}
        for operation, (_, _, params) in zip(operations, calls, strict=True)
    ]


def _plain(spec: ClusterSpec) -> dict[str, Any]:
    return {key: getattr(spec, key) for key in spec.__struct_fields__}


def _operation(aws: AWS, service: str, method: str) -> str:
    return f"{service} {aws.client(service).meta.method_to_api_mapping[method]}"


class _Names:
    """Replaces ids by their order of appearance, and times, keys and tokens by what they are."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def replace(self, value: Any, key: str = "") -> Any:
        if key in _HIDDEN:
            return _HIDDEN[key]
        if isinstance(value, Mapping):
            if value.get("Key") == "cloudddp:price":
                return {"Key": "cloudddp:price", "Value": "<price>"}
            return {name: self.replace(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.replace(item) for item in value]
        if isinstance(value, datetime):
            return "<time>"
        return self._text(value) if isinstance(value, str) else value

    def _text(self, value: str) -> str:
        def name(found: re.Match[str]) -> str:
            count = sum(known.startswith(f"{found[1]}-") for known in self._known.values())
            return self._known.setdefault(found[0], f"{found[1]}-{count + 1:08}")

        return _TIME.sub("<time>", _ID.sub(name, value))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the calls in a file: one on each line, as JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, calls: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(call)}\n" for call in calls))


def invalid(call: Mapping[str, Any]) -> str:
    """Return what botocore's service model objects to in one request, or ''."""
    service, operation = str(call["call"]).split()
    shape = _model(service).operation_model(operation).input_shape
    params = {name: datetime.now() if value == "<time>" else value for name, value in call["params"].items()}
    if "PublicKeyMaterial" in params:
        params["PublicKeyMaterial"] = b"key"
    return str(ParamValidator().validate(params, shape).generate_report())


@functools.cache
def _model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)
