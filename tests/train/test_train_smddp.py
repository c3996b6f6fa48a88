"""SageMaker's data parallel interface, version 1: scripts written for it run unchanged with `train/smddp` on the
path. What the ranks see comes from smddp_checks.py; smddp_script.py stands for such a script."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_smddp")]  # one worker runs the jobs
SHIM = harness.ROOT / "train" / "smddp"
HERE = Path(__file__).parent
SCRIPT = HERE / "smddp_script.py"
RANKS = 3
USE = """
import smdistributed.dataparallel.torch.distributed as dist, torch
dist.init_process_group()
print(torch.distributed.get_backend())
values = torch.ones(2)
dist.all_reduce(values)
print(values.tolist())
"""
WORKS = """
import torch.distributed as dist
make = lambda store, rank, world, timeout: dist.ProcessGroupGloo(store, rank, world, timeout)
dist.Backend.register_backend("smddp", make, devices=["cpu"])
"""

WORLD = "group=<group.WORLD: 'WORLD'>"
DOCUMENTED = {
    "is_available": [],
    "init_process_group": ["*args", "**kwargs"],
    "is_initialized": [],
    "get_world_size": [WORLD],
    "get_rank": [WORLD],
    "get_local_rank": [],
    "all_reduce": ["tensor", "op=<ReduceOp.SUM: 'SUM'>", WORLD, "async_op=False"],
    "broadcast": ["tensor", "src=0", WORLD, "async_op=False"],
    "all_gather": ["tensor_list", "tensor", WORLD, "async_op=False"],
    "all_to_all_single": [
        *("output_t", "input_t", "output_split_sizes=None", "input_split_sizes=None", WORLD, "async_op=False")
    ],
    "barrier": [WORLD, "async_op=False"],
    "DistributedDataParallel": [
        *("module", "device_ids=None", "output_device=None", "broadcast_buffers=True"),
        *("process_group=None", "bucket_cap_mb=None"),
    ],
}


def alone(**extra: object) -> dict[str, object]:
    """The environment of a job of one rank, without torchrun."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    return {**place, "MASTER_PORT": harness.free_port(), "PYTHONPATH": SHIM, **extra}


def passed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """What a job of three ranks printed, and what each rank reported."""
    folder = tmp_path_factory.mktemp("smddp")
    printed = passed(harness.torchrun(RANKS, HERE / "smddp_checks.py", folder, PYTHONPATH=SHIM))
    return printed, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.fixture
def reports(job: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return job[1]


def test_the_name_smdistributed_exists_only_where_the_folder_is_on_the_path() -> None:
    assert importlib.util.find_spec("smdistributed") is None


def test_parameters_are_those_of_the_guide_in_name_order_and_default(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["signatures"] == DOCUMENTED
    assert reports[0]["same class"]


def test_a_rank_knows_its_place_under_every_documented_name(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["place"] == (rank, rank, RANKS, rank)
        assert report["top"] == (rank, rank, RANKS)
        assert report["elsewhere"] == (7, 7, rank)
        assert report["torch's world"] == RANKS
        assert report["backend"] == "gloo"  # asked for smddp, which is not installed
        assert report["returned"] is None
        assert report["initialized"]


def test_before_init_process_group_a_job_is_available_and_every_call_says_what_to_call(
    reports: list[dict[str, Any]],
) -> None:
    before = reports[0]["before"]
    assert before["available"]
    assert not before["initialized"]
    assert len(before["calls"]) == 9
    for message in before["calls"].values():
        assert message.startswith("RuntimeError: the process group is missing")
        assert "init_process_group() first" in message


def test_groups_other_than_world_and_unknown_ops_are_refused(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["other group"]) == 9
        for message in report["other group"].values():
            assert message.startswith("ValueError: group ")
            assert "group.WORLD is supported" in message
        assert report["bad op"]["op"].startswith("ValueError: op 'SUM': use one of ReduceOp.AVERAGE")
        assert report["bad average"]["bool"].startswith("ValueError: booleans have no average")


def test_reductions_are_exact_and_none_means_sum_with_and_without_a_handle(
    reports: list[dict[str, Any]],
) -> None:
    # From [r + 1, -5 r, 7] of ranks 0, 1, 2; integers average toward zero.
    expected = {"SUM": [6, -15, 21], "None": [6, -15, 21], "MIN": [1, -10, 7], "MAX": [3, 0, 7]}
    expected["AVERAGE"] = [2, -5, 7]
    for report in reports:
        assert len(report["reductions"]) == 3 * 5 * 2
        for name, (tensor, kind) in report["reductions"].items():
            op, dtype, async_op = name.split()
            assert tensor.tolist() == expected[op], name
            assert str(tensor.dtype) == dtype
            assert (kind == "NoneType") is (async_op == "False")
        assert report["inexact"].tolist() == [1, -1]  # of 4 / 3 and -5 / 3
        assert torch.equal(report["polled"], torch.ones(1000))


def test_reductions_are_the_same_to_the_bit_on_every_rank(reports: list[dict[str, Any]]) -> None:
    for name in ("sum", "average"):
        assert all(torch.equal(report["random"][name], reports[0]["random"][name]) for report in reports)
    parts = [torch.randn(10_001, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    average = torch.stack(parts).double().mean(dim=0)
    assert (reports[0]["random"]["average"].double() - average).abs().max() < 1e-6


def test_broadcast_gather_and_all_to_all_move_the_right_values(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        for mode, seen in report["exchanges"].items():
            if mode == "default source":
                assert seen.tolist() == [5]
                continue
            assert seen["broadcast"].tolist() == [20, 21, 22, 23]
            assert [one.tolist() for one in seen["all_gather"]] == [[0, 0], [1, 1], [2, 4]]
            even = [100 * source + 2 * rank + k for source in range(RANKS) for k in range(2)]
            assert seen["even"].tolist() == even
            first = rank * (rank + 1) // 2
            rows = [
                [1000 * source + 2 * row, 1000 * source + 2 * row + 1]
                for source in range(RANKS)
                for row in range(first, first + rank + 1)
            ]
            assert seen["uneven"].tolist() == rows
            assert seen["handles"] == [mode == "True"] * 5


def test_training_equals_torchs_own_ddp_to_the_bit_also_when_rank_0_tests_alone(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        states = report["ddp"]["states"]
        for name, value in states["theirs"].items():
            assert torch.equal(states["ours"][name], value), name
            assert torch.equal(states["tested alone"][name], value), name
            if "running" not in name:
                assert torch.equal(states["unsent"][name], value), name
        assert report["ddp"]["warnings"] == []
        assert report["ddp"]["bucket"] == 2**20
    ours, unsent = (reports[1]["ddp"]["states"][name]["module.1.running_mean"] for name in ("ours", "unsent"))
    assert not torch.equal(ours, unsent)


def test_ranks_leave_the_job_at_the_end_of_the_script(job: tuple[str, list[dict[str, Any]]]) -> None:
    assert job[0].split() == ["left"] * RANKS


def test_the_guides_sample_trains_on_two_ranks_and_rank_0_saves(tmp_path: Path) -> None:
    """With a loading worker that imports the script anew, and must not join as a second rank: so it is with `spawn`,
    and on Linux with `forkserver`, the default from Python 3.14 on."""
    saved = tmp_path / "model.pt"
    argv = ["--save", saved, "--epochs", 1, "--workers", 1, "--start-method", "spawn"]
    printed = passed(harness.torchrun(2, SCRIPT, *argv, PYTHONPATH=SHIM))
    (line,) = printed.splitlines()
    assert line.startswith("epoch 1: ")
    assert int(line.split()[2]) > 32  # of 128; chance is one in eight
    assert "module.fc.weight" in torch.load(saved, weights_only=True)


def test_started_without_a_launcher_it_is_no_job(reports: list[dict[str, Any]]) -> None:
    available, message = reports[0]["by hand"].split(" ", 1)
    assert available == "False"
    assert message.startswith("RuntimeError: this is not a distributed job")
    assert "torchrun" in message


def test_started_without_a_launcher_the_sample_trains_alone(tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    passed(harness.python(SCRIPT, "--save", saved, "--epochs", 1, PYTHONPATH=SHIM))
    assert "fc.weight" in torch.load(saved, weights_only=True)


def test_a_real_installations_backend_is_used_and_one_that_is_broken_is_warned_of(tmp_path: Path) -> None:
    """Stand-ins for the library, which is not public: regular packages, and folders without __init__.py."""
    sources = {
        "works": WORKS,
        "broken": "raise ImportError('libsmddpcpp.so: cannot open shared object file')",
    }
    starts = []
    for name, source in sources.items():
        folder = tmp_path / name / "smdistributed" / "dataparallel" / "torch"
        folder.mkdir(parents=True)
        (folder / "torch_smddp.py").write_text(source)
        starts.append((["-c", USE], alone(PYTHONPATH=f"{SHIM}:{tmp_path / name}")))
    for package in list((tmp_path / "works").rglob("*/")):
        (package / "__init__.py").write_text("raise ImportError('hidden by the interface')")
    works, broken = harness.by_hand(starts)
    assert passed(works).split("\n")[:2] == ["smddp", "[1.0, 1.0]"]
    assert "left alone" not in works.stderr
    assert passed(broken).split("\n")[:2] == ["gloo", "[1.0, 1.0]"]
    assert "backend smddp is left alone, because it cannot be imported: libsmddpcpp.so" in broken.stderr
