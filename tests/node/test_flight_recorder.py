"""Where ranks wait for each other: NCCL's RAS, and dumps of PyTorch's flight recorder."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import Node, environ
from support.programs import program

from agent.watch import flight_recorder, ras
from cloudddp.agent.protocol.stacks import StacksRequest

# -- the flight recorder: what of dumps leaves a node, and what PyTorch's analyzer finds ---------------------


TENSOR: dict[str, Any] = {"sizes": [4], "dtypes": "Float"}


def entry(number: int, name: str = "all_reduce", state: str = "completed", **more: Any) -> dict[str, Any]:
    """An entry as ProcessGroupNCCL writes it (torch 2.15, FlightRecorder.hpp)."""
    frames = [
        {"name": "all_reduce", "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 1},
        {"name": "train", "filename": "/home/ubuntu/project/train.py", "line": 12},
    ]
    numbers = {
        "record_id": number - 1,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "pg_id": 0,
    }
    tensors = {f"{way}_{what}": [one] for way in ("input", "output") for what, one in TENSOR.items()}
    times = {"time_created_ns": 1, "timeout_ms": 1000, "retired": False, "is_p2p": False}
    times |= dict.fromkeys(("time_discovered_started_ns", "time_discovered_completed_ns"))  # type: ignore[arg-type]
    names = {"process_group": ("0", "default_pg"), "profiling_name": f"nccl:{name}", "state": state}
    return {"frames": frames, **numbers, **tensors, **times, **names, **more}


def dump(*entries: dict[str, Any], ranks: int = 2) -> bytes:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    return pickle.dumps({"version": "2.10", "pg_config": groups, "entries": list(entries)})


def folder_with(path: Path, **dumps: bytes) -> Path:
    (path / "flight-recorder").mkdir(parents=True)
    for name, data in dumps.items():
        (path / "flight-recorder" / name).write_bytes(data)
    return path


def unpacked(packed: str) -> list[dict[str, Any]]:
    return [json.loads(zlib.decompress(base64.b64decode(one))) for one in packed.split()]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch attacked",)


def test_dumps_are_read_without_executing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder_with(
        tmp_path / "job",
        rank_0=pickle.dumps({"version": Attack(), "pg_config": {}, "entries": []}),
        rank_1=dump(entry(1)),
        rank_2=b"\x80garbage",
        rank_3=pickle.dumps([1, 2]),
        rank_x=dump(entry(1)),
    )
    assert [one["rank"] for one in unpacked(flight_recorder.packed(folder))] == [1]
    assert not (tmp_path / "attacked").exists()
    assert flight_recorder.packed(tmp_path) == ""


def test_only_new_entries_and_frames_of_open_ones_are_sent(tmp_path: Path) -> None:
    entries = [*(entry(number) for number in range(1, 500)), entry(500, state="started")]
    folder = folder_with(tmp_path, rank_0=dump(*entries))
    sent = unpacked(flight_recorder.packed(folder))[0]["entries"]
    assert [one["collective_seq_id"] for one in sent] == list(range(301, 501))
    assert [bool(one["frames"]) for one in sent] == [False] * 199 + [True]


def test_dump_that_expands_without_limit_is_left_out(node: Node) -> None:
    """A kilobyte of shared references is 2**50 numbers as JSON."""
    node.start("")
    node.ended()
    bomb: Any = [0]
    for _ in range(50):
        bomb = [bomb, bomb]
    small = pickle.dumps({"pg_config": bomb, "entries": []})
    assert len(small) < 1000
    folder = node.folder() / "flight-recorder"
    (folder / "rank_0").write_bytes(small)
    (folder / "rank_1").write_bytes(dump(entry(1)))
    assert [one["rank"] for one in unpacked(node.call(StacksRequest(node.id())).packed)] == [1]


@pytest.mark.torch
def test_analyzer_of_torch_names_the_rank(node: Node) -> None:
    """The dumps of two nodes, of which each is packed by itself."""
    pytest.importorskip("torch")
    node.start("")
    node.ended()
    folder = node.folder()
    (folder / "flight-recorder" / "rank_0").write_bytes(dump(entry(1), entry(2, state="scheduled")))
    packed = [node.call(StacksRequest(node.id())).packed]
    (folder / "flight-recorder" / "rank_0").unlink()
    assert node.call(StacksRequest(node.id())).packed == ""
    (folder / "flight-recorder" / "rank_1").write_bytes(dump(entry(1)))
    packed.append(node.call(StacksRequest(node.id())).packed)
    request = StacksRequest(node.id(), dumps=tuple(packed), project="p", python=sys.executable)
    assert node.call(request).conclusion == (
        "flight recorder: Not all ranks joining collective, sequence number: 2; group info: 0:default_pg; "
        "collective: nccl:all_reduce; missing ranks: {1}"
    )
    analysis = (folder / "flight-recorder" / "analysis.txt").read_text()
    assert "train at /home/ubuntu/project/train.py:12" in analysis


def test_failure_of_the_analyzer_and_python_without_torch_are_reported(tmp_path: Path) -> None:
    none = flight_recorder.conclusion("", failed=False)
    assert none == "flight recorder: all ranks have joined the same collectives, as far as they are recorded"
    traceback = "Traceback (most recent call last):\nKeyError: 7\n"
    failed = flight_recorder.conclusion(traceback, failed=True)
    assert failed == "flight recorder: PyTorch's analyzer failed: KeyError: 7"
    folder = folder_with(tmp_path, rank_0=dump(entry(1)))
    lean = program(tmp_path / "python", f'exec {sys.executable} -IS "$@"')
    for python, why in (
        (str(lean), "ModuleNotFoundError: No module named 'torch'"),
        (str(tmp_path / "no"), f"{tmp_path}/no: No such file or directory"),
    ):
        found = flight_recorder.analyze(folder, python, [flight_recorder.packed(folder)])
        assert found.startswith(f"flight recorder: PyTorch's analyzer failed: {why}")


# -- NCCL's RAS: a server that speaks its protocol, with the answers of NCCL's documentation -----------------


HEAD = """Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING      OK
"""
# NCCL's documentation, "RAS", 2.24 to 2.29, and the formats of src/ras/client_support.cc.
MISMATCH = f"""{HEAD}
Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 7 -- GPU 7 managed by process 483079 on node 172.16.64.210
"""
OLD_INCOMPLETE = f"""{HEAD}
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            MISMATCH,
            "#0-0 (27a079b828ff1a75) MISMATCH; "
            "Communicator ranks have different collective operation counts; "
            "30 ranks have launched up to operation 6650; 2 ranks have launched up to operation 6649; "
            "Rank 0; Rank 7",
        ),
        (
            OLD_INCOMPLETE,
            "INCOMPLETE; Missing communicator data from 1 job process; "
            "Process 3487984 on node 172.16.64.213 managing GPU 5; "
            "#0-0 (cf264af53edbe986) INCOMPLETE; Missing communicator data from 1 rank; "
            "The missing rank: 21; "
            "TIMEOUT; Encountered 2 communication timeouts while gathering communicator data",
        ),
    ],
)
def test_report_in_a_sentence(text: str, sentence: str) -> None:
    assert ras.summary(text) == (sentence and f"NCCL RAS: {sentence}")


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server for one connection; yield its port."""

    def run() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
    thread.join(20)


def nccl(connection: socket.socket) -> None:
    """The dialogue of NCCL's client_support.cc."""
    with connection.makefile("rwb") as lines:
        for line in lines:
            word = line.strip().lower()
            if word.startswith(b"timeout "):
                lines.write(b"OK\n")
            elif word == b"verbose status":
                lines.write(MISMATCH.encode())
                return
            else:
                lines.write(b"ERROR: Unknown command\n")
            lines.flush()


def garbage(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"220 mail.example.com ESMTP\r\n" * 1000)


def endless(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(f"OK\n{HEAD}{ras.ERRORS}".encode())
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"x" * (1 << 16))


def test_report_is_asked_for_and_other_servers_are_left() -> None:
    with serving(nccl) as port:
        assert ras.ask("127.0.0.1", port) == MISMATCH
    with serving(garbage) as port:
        assert ras.ask("127.0.0.1", port) == ""
    assert ras.ask("127.0.0.1", port) == ""  # refused
    assert ras.ask("127.0.0.1", 1 << 20) == ""


def test_answer_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(endless) as port:
        assert ras.MAX_BYTES - 10 <= len(ras.ask("127.0.0.1", port)) <= ras.MAX_BYTES + (1 << 16)
    monkeypatch.setattr(ras, "SECONDS", 0.3)
    release = threading.Event()
    with serving(lambda _: release.wait(10) and None) as port:
        began = time.monotonic()
        assert ras.ask("127.0.0.1", port) == ""
        assert time.monotonic() - began < 5
        release.set()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10.0.0.7:4000", ("10.0.0.7", 4000)),
        ("[::1]:4000", ("::1", 4000)),
        (":4000", ("localhost", 4000)),
        ("nonsense", ("localhost", 28028)),
        (None, ("localhost", 28028)),
    ],
)
def test_address_is_that_of_the_rank(value: str | None, expected: tuple[str, int]) -> None:
    env = os.environ if value is None else {**os.environ, "NCCL_RAS_ADDR": value}
    with subprocess.Popen(["sleep", "60"], env=env) as rank:
        environ(rank.pid)
        found = ras.address(rank.pid)
        rank.kill()
    assert found == expected
    assert ras.address(0) == ("localhost", 28028)
