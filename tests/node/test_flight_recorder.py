"""Dumps of PyTorch's flight recorder: what of them leaves a node, and what PyTorch's analyzer finds."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.agentnode import Node

from agent.watch import flight_recorder
from cloudddp.agent.protocol.stacks import StacksRequest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")


def entry(number: int, name: str = "all_reduce", state: str = "completed", **more: Any) -> dict[str, Any]:
    """An entry as ProcessGroupNCCL writes it (torch 2.15, FlightRecorder.hpp)."""
    frames = [
        {"name": "all_reduce", "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 1},
        {"name": "train", "filename": "/home/ubuntu/project/train.py", "line": 12},
    ]
    return {
        "frames": frames,
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 1000,
        "is_p2p": False,
        **more,
    }


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


@pytest.mark.parametrize(
    ("output", "failed", "conclusion"),
    [
        ("", False, "all ranks have joined the same collectives, as far as they are recorded"),
        ("Traceback (most recent call last):\nKeyError: 7\n", True, "PyTorch's analyzer failed: KeyError: 7"),
        (
            "We cannot decide what's wrong because we missed FR dumps from ranks ({1, 2, 3}) so\n" * 9,
            False,
            "We cannot decide what's wrong because we missed FR dumps from ranks ({1, 2, 3}) so",
        ),
        (
            "Collective sequence number: 2 has errors\ninternal record id: 1\ncollective: nccl:all_reduce\n"
            "error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH\n",
            False,
            "Collective sequence number: 2 has errors; collective: nccl:all_reduce; "
            "error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH",
        ),
        (
            "Not all ranks joining collective, sequence number: 9\nmissing ranks: {1}\n"
            "Not all ranks joining collective, sequence number: 10\nmissing ranks: {2}\n",
            False,
            "Not all ranks joining collective, sequence number: 9; missing ranks: {1}; "
            "Not all ranks joining collective, sequence number: 10; missing ranks: {2}",
        ),
    ],
)
def test_other_outputs_of_the_analyzer(output: str, failed: bool, conclusion: str) -> None:
    assert flight_recorder.conclusion(output, failed=failed) == f"flight recorder: {conclusion}"


def test_python_without_torch_is_reported(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, rank_0=dump(entry(1)))
    lean = tmp_path / "python"
    lean.write_text(f'#!/bin/sh\nexec {sys.executable} -IS "$@"\n')
    lean.chmod(0o755)
    for python, why in (
        (str(lean), "ModuleNotFoundError: No module named 'torch'"),
        (str(tmp_path / "no"), "[Errno 2]"),
    ):
        found = flight_recorder.analyze(folder, python, [flight_recorder.packed(folder)])
        assert found.startswith(f"flight recorder: PyTorch's analyzer failed: {why}")
