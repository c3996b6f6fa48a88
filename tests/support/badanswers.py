"""Replies that do not fit the protocol, for the tests of the decoders and the tests with a hostile node."""

from __future__ import annotations

import json
from typing import Any

PROBE = {
    "interface": "lo",
    "gpus": 4,
    "cpus": 2,
    "python": "/bin/false",
    "free_port": 29500,
    "agent_port": 29501,
    "time": 1e9,
    "timer_state": "active",
    "timer_next": "x",
    "running": [],
    "differs": False,
    "torch_gpus": None,
    "torch_error": "",
    "efa": 0,
}
JOB = {"job": "20260101-000000-abcd", "node": 0, "phase": "running", "ranks": []}
RANK = {"rank": 0, "exit_code": None, "ended": None}


def changed(base: dict[str, Any], **values: Any) -> str:
    return json.dumps({**base, **values})


def without(base: dict[str, Any], key: str) -> str:
    return json.dumps({k: v for k, v in base.items() if k != key})


JUNK = {
    "nothing": "",
    "no JSON": "hello\n",
    "null": "null",
    "a list": "[]",
    "a number": "7",
    "a string": '"x"',
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep in a key": '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "not UTF-8": b'{"interface": "\xff\xfe"}',
    "NUL bytes": b"\0" * 1000,
    "control characters": '{"\x1b]0;owned\x07": 1}',
    "half": '{"interface": "lo", ',
}

BAD_PROBES = {
    **JUNK,
    "without interface": without(PROBE, "interface"),
    "gpus as text": changed(PROBE, gpus="4"),
    "gpus below 0": changed(PROBE, gpus=-1),
    "gpus is a boolean": changed(PROBE, gpus=True),
    "gpus without end": changed(PROBE, gpus=10**4000),
    "gpus of 5,000 digits": json.dumps(PROBE).replace('"gpus": 4', '"gpus": ' + "9" * 5000),
    "torch_gpus below 0": changed(PROBE, torch_gpus=-1),
    "torch_gpus without end": changed(PROBE, torch_gpus=10**4000),
    "torch_error without end": changed(PROBE, torch_error="x" * (1 << 17)),
    "time is nan": json.dumps(PROBE).replace("1000000000.0", "NaN"),
    "time is infinite": json.dumps(PROBE).replace("1000000000.0", "1e999"),
    "no cpus": changed(PROBE, cpus=0),
    "port out of range": changed(PROBE, free_port=70000),
    "interface with a line break": changed(PROBE, interface="lo\nX=1"),
    "interface with an escape": changed(PROBE, interface="\x1b[2J"),
    "interface is long": changed(PROBE, interface="x" * 16),
    "python is long": changed(PROBE, python="/" * 5000),
    "a running job that is a path": changed(PROBE, running=["../../x"]),
    "many running jobs": changed(PROBE, running=[f"job-{number}" for number in range(21)]),
    "running is a word": changed(PROBE, running="abc"),
    "differs is a word": changed(PROBE, differs="yes"),
}


def jobs(**values: Any) -> str:
    return json.dumps({"jobs": [{**JOB, **values}]})


BAD_JOBS = {
    **JUNK,
    "jobs is an object": '{"jobs": {}}',
    "without jobs": "{}",
    "id is an absolute path": jobs(job="/tmp/x"),
    "id leaves the folder": jobs(job="z/../../.ssh"),
    "id is two dots": jobs(job=".."),
    "id is empty": jobs(job=""),
    "id with a line break": jobs(job="a\n"),
    "id with an escape": jobs(job="a\x1b[2J"),
    "id begins with a dash": jobs(job="--help"),
    "id is long": jobs(job="a" * 65),
    "id is a number": jobs(job=7),
    "id without a time": jobs(job="zzz"),
    "id with more than a time": jobs(job="20260101-000000-abcd-x"),
    "id of other digits": jobs(job="\u0663"),
    "phase is unknown": jobs(phase="happy"),
    "phase is a list": jobs(phase=["running"]),
    "stopping is a number": jobs(stopping=1),
    "node is a boolean": jobs(node=True),
    "rank below 0": jobs(ranks=[{**RANK, "rank": -5}]),
    "exit code is large": jobs(ranks=[{**RANK, "exit_code": 256, "ended": 1}]),
    "an end without an exit code": jobs(ranks=[{**RANK, "ended": 1}]),
    "many ranks": jobs(ranks=[RANK] * 300),
    "started in the year 10^9": jobs(started=1e20),
    "unknown training state": jobs(training={"reported": 1, "state": "\x1b[2J"}),
    "large step": jobs(training={"reported": 1, "step": 10**300}),
}


BAD_FRAMES = {
    "a frame of 100 GB": b"log 0 0 100000000000\nabc",
    "a frame of 100 kB": b"log 0 0 100000\n" + b"x" * 100_000,
    "offset below 0": b"log 0 -1 3\nabc",
    "size below 0": b"log 0 0 -1\n",
    "offset is large": b"log 0 9999999999999999 0\n",
    "rank is not a number": b"log x 0 3\nabc",
    "rank is large": b"log 999999 0 3\nabc",
    "too few words": b"log 0\n",
    "an unknown frame": b"\x1b]0;owned\x07\n",
    "a state that is junk": b"state []\n",
    "a state that is deep": b'state {"x":' + b"[" * 100_000 + b"\n",
    "a state of another job's path": b'state {"job": "../x", "phase": "running"}\n',
    "logs of many ranks": b"".join(b"log %d 0 1\nx" % rank for rank in range(1000)),
}
