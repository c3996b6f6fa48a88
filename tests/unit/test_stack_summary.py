"""From what py-spy reports of ranks to the sentence about them. The dumps are py-spy's, of ranks of torch
2.15 with gloo that wait for rank 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.watch import py_spy
from cloudddp.agent.protocol.stacks import MAX_STACK, MAX_WORD, Position, elsewhere, summary

DUMPS = Path(__file__).parents[1] / "support" / "stack_dumps"


def position(name: str, rank: int = 0) -> Position:
    threads = py_spy.parse((DUMPS / f"{name}.json").read_text())
    return py_spy.rank_stack(rank, threads).position


@pytest.mark.parametrize(
    ("name", "waits", "line"),
    [
        ("all_reduce-0.native", "all_reduce", 19),
        ("objects-0.native", "broadcast_object_list", 18),
        ("ddp-0.native", "DistributedDataParallel.__init__", 13),
        ("gradients-0.native", "all_reduce of DDP's gradients", 15),
        ("buffers-1.native", "broadcast of DDP's buffers", 14),
    ],
)
def test_collective_is_that_which_the_script_called(name: str, waits: str, line: int) -> None:
    found = position(name)
    assert (found.waits, found.file, found.line) == (waits, "ddp.py", line)


def test_rank_that_is_elsewhere_is_named_with_its_line() -> None:
    waiting = [position("all_reduce-0.native", rank) for rank in (0, 1, 3)]
    busy = position("all_reduce-1.native", 2)
    assert summary([*waiting, busy]) == (
        "ranks 0, 1 and 3 wait in all_reduce (ddp.py:19); rank 2 is in load_batch (ddp.py:4)"
    )
    assert elsewhere([*waiting, busy]) == busy
    assert elsewhere(waiting) is None


def test_rank_in_another_collective_is_the_one_that_is_elsewhere() -> None:
    waiting = [position("all_reduce-0.native", rank) for rank in (0, 1)]
    other = position("barrier-0.native", 2)
    assert summary([*waiting, other]) == (
        "ranks 0 and 1 wait in all_reduce (ddp.py:19); rank 2 waits in barrier (ddp.py:14)"
    )
    assert elsewhere([*waiting, other]) == other


def test_without_native_frames_a_wait_for_a_work_is_only_a_line() -> None:
    assert summary([position("item-0")]) == "rank 0 is in train (ddp.py:16)"


def frame(name: str, file: str, line: int = 0) -> dict[str, object]:
    return {
        "name": name,
        "filename": file,
        "short_filename": file.rpartition("site-packages/")[2],
        "line": line,
    }


def test_library_that_the_script_called_is_named() -> None:
    torch = "/opt/pytorch/lib/python3.11/site-packages/torch/"
    frames = [
        frame("_try_get_data", torch + "utils/data/dataloader.py", 1284),
        frame("__next__", torch + "utils/data/dataloader.py", 700),
        frame("train", "train.py", 40),
    ]
    threads = py_spy.parse(json.dumps([{"pid": 1, "os_thread_id": 1, "frames": frames}]))
    found = py_spy.rank_stack(5, threads).position
    assert summary([found]) == (
        "rank 5 is in train (train.py:40), inside __next__ (torch/utils/data/dataloader.py:700)"
    )


def test_rank_that_waits_for_its_gpu_is_reported() -> None:
    frames = [frame("cudaStreamSynchronize", "libcudart.so"), frame("train", "train.py", 7)]
    threads = py_spy.parse(json.dumps([{"thread_name": "MainThread", "frames": frames}]))
    found = [py_spy.rank_stack(rank, threads).position for rank in range(8)]
    assert summary(found) == "ranks 0-7 wait in cudaStreamSynchronize (train.py:7)"


def test_missing_stacks_are_mentioned_and_groups_are_bounded() -> None:
    lost = Position(1, error="py-spy is missing on its node")
    assert summary([lost]) == "no stack of rank 1: py-spy is missing on its node"
    many = [Position(rank, function=f"f{rank}", file="a.py", line=rank + 1) for rank in range(20)]
    assert summary(many).endswith("; and 14 more ranks elsewhere")
    assert summary([]) == ""


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", "null", "[" * 100_000])
def test_output_that_is_no_dump_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        py_spy.parse(text)


def test_hostile_dump_is_bounded() -> None:
    frames = [frame("n" * 10_000, "f" * 10_000, 1 << 80)] * 12
    threads = py_spy.parse(json.dumps([{"thread_name": "t" * 9999, "frames": frames}] * 40))
    found = py_spy.rank_stack(0, threads)
    assert len(found.text) == MAX_STACK
    assert len(found.position.function) <= MAX_WORD


def test_dump_that_is_too_long_is_not_read() -> None:
    with pytest.raises(ValueError, match="longer than 16 MiB"):
        py_spy.parse(json.dumps([{"thread_name": "t", "frames": []}] * 500_000))
