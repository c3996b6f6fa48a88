"""SageMaker's data parallel interface, version 1: scripts written for it run unchanged with `train/smddp` on
the path.

smddp_checks.py reports what the ranks see; smddp_script.py is such a script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_smddp")]
SHIM = launch.ROOT / "train" / "smddp"
SCRIPT = launch.CHECKS / "smddp_script.py"
RANKS = 3
# Registers gloo under the name of the real library's backend.
WORKING_BACKEND = """
import torch.distributed as dist
make = lambda store, rank, world, timeout: dist.ProcessGroupGloo(store, rank, world, timeout)
dist.Backend.register_backend("smddp", make, devices=["cpu"])
"""
BROKEN_BACKEND = "raise ImportError('libsmddpcpp.so: cannot open shared object file')"

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


def one_rank(**extra: object) -> dict[str, object]:
    """Return the environment of a job of one rank, without torchrun."""
    return {**launch.rendezvous(1), "RANK": 0, "LOCAL_RANK": 0, "PYTHONPATH": SHIM, **extra}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a job of three reported. They leave the job when the script ends."""
    folder = tmp_path_factory.mktemp("smddp")
    ranks = launch.run_ranks(RANKS, launch.CHECKS / "smddp_checks.py", folder, PYTHONPATH=SHIM)
    assert [rank.stdout for rank in ranks] == ["left\n"] * RANKS
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_parameters_are_the_documented_ones(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["signatures"] == DOCUMENTED
    assert reports[0]["same class"]


def test_rank_is_available_under_every_documented_name(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["position"] == (rank, rank, RANKS, rank)
        assert report["top"] == (rank, rank, RANKS)
        assert report["with local rank 7"] == (7, 7, rank)
        assert report["torch's world"] == RANKS
        assert report["backend"] == "gloo"  # smddp was requested, and is not installed
        assert report["returned"] is None
        assert report["initialized"]


def test_calls_before_init_process_group_are_refused(reports: list[dict[str, Any]]) -> None:
    before = reports[0]["before"]
    assert before["available"]
    assert not before["initialized"]
    assert len(before["calls"]) == 9
    for message in before["calls"].values():
        assert message.startswith("RuntimeError: there is no process group")
        assert "init_process_group() first" in message


def test_other_groups_and_unknown_ops_are_refused(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["other group"]) == 9
        for message in report["other group"].values():
            assert message.startswith("ValueError: group ")
            assert "group.WORLD is supported" in message
        assert report["bad op"]["op"].startswith("ValueError: op 'SUM': use one of ReduceOp.AVERAGE")
        assert report["bad average"]["bool"].startswith("ValueError: booleans have no average")


def test_reductions_are_exact_with_and_without_a_handle(reports: list[dict[str, Any]]) -> None:
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


def test_reductions_are_bitwise_equal_on_every_rank(reports: list[dict[str, Any]]) -> None:
    for name in ("sum", "average"):
        assert all(torch.equal(report["random"][name], reports[0]["random"][name]) for report in reports)
    parts = [torch.randn(10_001, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    average = torch.stack(parts).double().mean(dim=0)
    assert (reports[0]["random"]["average"].double() - average).abs().max() < 1e-6


def test_broadcast_gather_and_all_to_all_move_the_right_values(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        for mode, values in report["exchanges"].items():
            if mode == "default source":
                assert values.tolist() == [5]
                continue
            assert values["broadcast"].tolist() == [20, 21, 22, 23]
            assert [one.tolist() for one in values["all_gather"]] == [[0, 0], [1, 1], [2, 4]]
            even = [100 * source + 2 * rank + k for source in range(RANKS) for k in range(2)]
            assert values["even"].tolist() == even
            first = rank * (rank + 1) // 2
            rows = [
                [1000 * source + 2 * row, 1000 * source + 2 * row + 1]
                for source in range(RANKS)
                for row in range(first, first + rank + 1)
            ]
            assert values["uneven"].tolist() == rows
            assert values["handles"] == [mode == "True"] * 5


def test_training_is_bitwise_equal_to_torch_ddp(reports: list[dict[str, Any]]) -> None:
    """Also when rank 0 evaluates the model alone."""
    for report in reports:
        states = report["ddp"]["states"]
        for name, value in states["theirs"].items():
            assert torch.equal(states["ours"][name], value), name
            assert torch.equal(states["tested alone"][name], value), name
            if "running" not in name:
                assert torch.equal(states["buffers not sent"][name], value), name
        assert report["ddp"]["warnings"] == []
        assert report["ddp"]["bucket"] == 2**20
    states = reports[1]["ddp"]["states"]
    ours, unsent = (states[name]["module.1.running_mean"] for name in ("ours", "buffers not sent"))
    assert not torch.equal(ours, unsent)


def test_spawned_loading_worker_does_not_join_as_a_second_rank(tmp_path: Path) -> None:
    """It imports the script again: with `spawn`, and from Python 3.14 on with Linux' default,
    `forkserver`."""
    weights = tmp_path / "model.pt"
    launch.succeeded([launch.start(SCRIPT, weights, "--workers", 1, **one_rank())])
    assert "module.3.weight" in torch.load(weights, weights_only=True)


def test_without_a_launcher_there_is_no_job(reports: list[dict[str, Any]]) -> None:
    available, message = reports[0]["without rank"].split(" ", 1)
    assert available == "False"
    assert message.startswith("RuntimeError: this is not a distributed job")
    assert "torchrun" in message


def test_script_trains_alone_without_a_launcher(tmp_path: Path) -> None:
    weights = tmp_path / "model.pt"
    launch.run_ranks(1, SCRIPT, weights, PYTHONPATH=SHIM)
    assert "3.weight" in torch.load(weights, weights_only=True)


@pytest.mark.parametrize(
    ("source", "expected"), [(WORKING_BACKEND, "smddp"), (BROKEN_BACKEND, "gloo")], ids=["works", "broken"]
)
def test_backend_of_a_real_installation_is_used_if_it_works(
    source: str, expected: str, tmp_path: Path
) -> None:
    """Stand-ins for the library, which is not public: regular packages, and folders without __init__.py."""
    folder = tmp_path / "smdistributed" / "dataparallel" / "torch"
    folder.mkdir(parents=True)
    (folder / "torch_smddp.py").write_text(source)
    if source == WORKING_BACKEND:
        for package in list(tmp_path.rglob("*/")):
            (package / "__init__.py").write_text("raise ImportError('hidden by the interface')")
    path = f"{SHIM}:{tmp_path}"
    (done,) = launch.succeeded(
        [launch.start(launch.CHECKS / "smddp_backend.py", **one_rank(PYTHONPATH=path))]
    )
    assert done.stdout.split("\n")[:2] == [expected, "[1.0, 1.0]"]
    warning = "backend smddp is not used because it cannot be imported: libsmddpcpp.so"
    assert (warning in done.stderr) is (expected == "gloo")
