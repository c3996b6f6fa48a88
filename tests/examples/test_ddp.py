"""examples/ddp/train.py as real processes: what ranks compute, interruptions, snapshots."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import processes
from support.training import launch
from support.training.damage import flip_a_bit
from support.training.output import differing_paths, max_difference, stop_during_snapshot

pytestmark = [
    pytest.mark.torch,
    pytest.mark.xdist_group("example_ddp"),
    # not importorskip: each test process would import it
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"),
]
SCRIPT = launch.ROOT / "examples" / "ddp" / "train.py"
ENDLESS = ["--epochs", 10_000]  # for runs that are interrupted; the number of epochs does not change a step

# Rounding errors are smaller there, so that a wrong weight of one sample cannot hide among them.
IN_FLOAT64 = """
import runpy, sys, torch
torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# The same training without ranks, in the plainest way.
REFERENCE = """
import runpy, sys, torch
script, epochs, batch_size, result = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_default_dtype(torch.float64)
train = runpy.run_path(script)
torch.manual_seed(0)
model = train["build_model"]()
images, labels = train["build_data"]()[0].tensors
optimizer = torch.optim.AdamW(model.parameters(), 0.006)
for epoch in range(epochs):
    for batch in train["global_batches"](len(labels), batch_size, 0, epoch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
torch.save(model.state_dict(), result)
"""


@functools.cache
def zygote() -> processes.Zygote:
    modules = ("sklearn.datasets", "torch._dynamo", "torch.utils.data._utils.worker")
    return processes.Zygote(*modules, env=launch.environment())


def start(*argv: object, **env: object) -> launch.Run:
    words = [str(word) for word in argv]
    return launch.Run(zygote().start(words, launch.ROOT, launch.environment(**env), session=True))


def start_ranks(outs: list[Path], *options: object, script: Path = SCRIPT, **env: object) -> list[launch.Run]:
    """Start one rank for each folder. Ranks that have different folders are on nodes of their own."""
    argv = ["-c", IN_FLOAT64, script, *options, "--out"]
    if len(outs) == 1:
        return [start(*argv, outs[0], **env)]
    shared = {**launch.rendezvous(len(outs)), **env}
    local_ranks = [outs[:rank].count(out) for rank, out in enumerate(outs)]
    return [
        start(*argv, out, **shared, RANK=rank, LOCAL_RANK=local_ranks[rank]) for rank, out in enumerate(outs)
    ]


def run_ranks(outs: list[Path], *options: object, **settings: Any) -> list[launch.Run]:
    return launch.succeeded(start_ranks(outs, *options, **settings))


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def status(out: Path) -> dict[str, Any]:
    return json.loads((out / "status.json").read_text(encoding="utf-8"))


def printed_epochs(run: launch.Run) -> list[int]:
    return [int(number) for number in re.findall(r"^epoch (\d+): ", run.stdout, re.MULTILINE)]


def wait_for_snapshot(out: Path, runs: list[launch.Run]) -> None:
    launch.until(lambda: (out / "latest.pt").exists() or any(run.ended() for run in runs), "a snapshot")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the folder of an uninterrupted run on one node."""

    @functools.cache
    def run(ranks: int, *options: object) -> Path:
        out = tmp_path_factory.mktemp("trained")
        run_ranks([out] * ranks, *options)
        return out

    return run


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return launch.imported(SCRIPT)


def test_order_depends_on_seed_and_epoch_and_uses_each_sample_once(example: ModuleType) -> None:
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        batches = example.global_batches(23, 5, seed, epoch)
        assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
        orders[seed, epoch] = [sample for batch in batches for sample in batch]
        assert sorted(orders[seed, epoch]) == list(range(23))
        assert batches == example.global_batches(23, 5, seed, epoch)
    assert len({tuple(order) for order in orders.values()}) == 4


def test_weights_are_those_of_the_mean_over_each_global_batch(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    """Of 479 samples three ranks take 160, 160 and 159; of the last one of an epoch, 1, 0 and 0."""
    options = ["--epochs", 3, "--batch-size", 479]
    (run,) = launch.wait(start("-c", REFERENCE, SCRIPT, 3, 479, tmp_path / "weights.pt"))
    assert run.code == 0, run.stderr
    found = load(trained(3, *options) / "latest.pt")
    assert found["step"] == 12
    assert max_difference(found["model"], load(tmp_path / "weights.pt")) <= 1e-12
    alone = load(trained(1, *options) / "latest.pt")
    assert found["best"] == alone["best"]
    assert found["optimizer"]["state"].keys() == alone["optimizer"]["state"].keys()
    for number, state in found["optimizer"]["state"].items():
        assert max_difference(state, alone["optimizer"]["state"][number]) <= 1e-12


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two ranks that were stopped by a SIGTERM to the second."""
    out = tmp_path_factory.mktemp("preempted")
    copy = out.with_name("launcher.json")
    runs = start_ranks([out] * 2, *ENDLESS, "--save-every", 1, CLOUDDDP_STATUS_FILE=copy)
    launch.until(lambda: copy.exists() or any(run.ended() for run in runs), "a report")
    assert {status(out)["state"], json.loads(copy.read_text())["state"]} == {"running"}
    runs[1].signal(signal.SIGTERM)
    launch.wait(*runs)
    assert [run.code for run in runs] == [143] * 2, "".join(run.stderr for run in runs)
    assert copy.read_text() == (out / "status.json").read_text()
    return out


def epochs_beyond(snapshot: dict[str, Any]) -> int:
    """Return the number of epochs that is complete next, 23 steps each."""
    return int(snapshot["step"]) // 23 + 1


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_sigterm_on_one_rank_stops_all_at_one_step_with_a_snapshot(preempted: Path) -> None:
    snapshot = load(preempted / "latest.pt")
    assert status(preempted) == {
        "state": "preempted",
        "step": snapshot["step"],
        "steps": 23 * 10_000,
        "best_accuracy": snapshot["best"] or None,
    }
    assert {path.name for path in preempted.iterdir()} <= {"latest.pt", "best.pt", "status.json"}


def test_a_preempted_run_resumes_with_the_same_bits(
    preempted: Path, trained: Callable[..., Path], tmp_path: Path
) -> None:
    """On another number of ranks the last bits may differ: DDP adds up in another order."""
    epochs = ["--epochs", epochs_beyond(load(preempted / "latest.pt"))]
    out, expected = copied(preempted, tmp_path / "out"), load(trained(2, *epochs) / "latest.pt")
    run_ranks([out] * 2, *epochs)
    assert differing_paths(load(out / "latest.pt"), expected) == []
    assert (status(out)["state"], status(out)["step"]) == ("finished", status(out)["steps"])
    other = copied(preempted, tmp_path / "three ranks")
    run_ranks([other] * 3, *epochs)
    assert max_difference(load(other / "latest.pt")["model"], expected["model"]) <= 1e-12


def test_dropout_continues_with_the_same_bits(tmp_path: Path) -> None:
    """In a copy that a user has changed; stopped by a SIGTERM that its loading processes get, too."""
    changed = tmp_path / "train.py"
    source = SCRIPT.read_text(encoding="utf-8")
    assert "nn.Flatten()," in source
    changed.write_text(source.replace("nn.Flatten(),", "nn.Flatten(), nn.Dropout(),"), encoding="utf-8")
    out = tmp_path / "out"
    runs = start_ranks([out], *ENDLESS, "--save-every", 1, "--workers", 2, script=changed)
    wait_for_snapshot(out, runs)
    runs[0].signal_session(signal.SIGTERM)
    launch.wait(*runs)
    assert runs[0].code == 143, runs[0].stderr
    epochs = ["--epochs", epochs_beyond(load(out / "latest.pt"))]
    for folder in (out, tmp_path / "whole"):
        run_ranks([folder], *epochs, script=changed)
    assert differing_paths(load(out / "latest.pt"), load(tmp_path / "whole" / "latest.pt")) == []


def test_run_killed_during_a_snapshot_write_resumes(trained: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (run,) = start_ranks([out], *ENDLESS, "--save-every", 1)
    latest = out / "latest.pt"
    wait_for_snapshot(out, [run])
    stop_during_snapshot(latest, run.pid, "latest.pt.*.tmp")
    run.kill_session()
    run.wait()
    assert [*out.glob("latest.pt.*.tmp")]
    epochs = ["--epochs", epochs_beyond(load(latest))]
    run_ranks([out], *epochs)
    assert differing_paths(load(latest), load(trained(1, *epochs) / "latest.pt")) == []


def test_latest_is_written_after_a_crash_between_best_and_latest(tmp_path: Path) -> None:
    """best.pt of the last step is written, latest.pt of it is not."""
    out = tmp_path / "out"
    run_ranks([out], "--epochs", 1)
    best = load(out / "best.pt")
    torch.save({**best, "step": best["step"] - 1}, out / "latest.pt")
    run_ranks([out], "--epochs", 1)
    assert differing_paths(load(out / "latest.pt"), best) == []


def test_newest_snapshot_of_any_node_is_elected(trained: Callable[..., Path], tmp_path: Path) -> None:
    """Three nodes with a disk each. The first is new, the third has missed an epoch."""
    nodes = [tmp_path / f"node{number}" for number in range(3)]
    run_ranks(nodes, "--epochs", 1)
    assert differing_paths(load(nodes[0] / "latest.pt"), load(nodes[2] / "latest.pt")) == []
    assert not (nodes[1] / "status.json").exists()  # rank 0 writes it
    missed = copied(nodes[2], tmp_path / "missed")
    run_ranks(nodes, "--epochs", 2)
    new = tmp_path / "new"
    runs = run_ranks([new, nodes[1], missed], "--epochs", 3)
    assert printed_epochs(runs[0]) == [3]
    whole = load(trained(3, "--epochs", 3) / "latest.pt")
    latest = load(new / "latest.pt")
    assert (latest["step"], latest["best"]) == (whole["step"], whole["best"])
    assert max_difference(latest["model"], whole["model"]) <= 1e-12
    for node in (nodes[1], missed):
        assert differing_paths(load(node / "latest.pt"), latest) == []
        assert differing_paths(load(node / "best.pt"), load(new / "best.pt")) == []


def test_damaged_newest_snapshot_is_skipped(trained: Callable[..., Path], tmp_path: Path) -> None:
    """The run continues from the best one, which is older or the same."""
    out = copied(trained(1, "--epochs", 2), tmp_path / "out")
    flip_a_bit(out / "latest.pt")
    (run,) = run_ranks([out], "--epochs", 3)
    assert f"rank 0: skipping the damaged {out}/latest.pt: " in run.stdout
    first = load(trained(1, "--epochs", 2) / "best.pt")["step"] // 23 + 1
    assert printed_epochs(run) == list(range(first, 4))
    assert differing_paths(load(out / "latest.pt"), load(trained(1, "--epochs", 3) / "latest.pt")) == []


def test_damaged_best_snapshot_is_replaced_by_the_latest(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where no later evaluation is better: here all are the same. Weights alone are no snapshot."""
    out = copied(trained(1, "--epochs", 2), tmp_path / "out")
    torch.save(load(out / "best.pt")["model"], out / "best.pt")
    (run,) = run_ranks([out], "--epochs", 3, "--lr", 1e-30)
    assert f"rank 0: skipping the damaged {out}/best.pt: " in run.stdout
    best = load(out / "best.pt")
    assert best["step"] == 46
    assert 0 < best["best"] == status(out)["best_accuracy"]
    assert differing_paths(best["model"], load(trained(1, "--epochs", 2) / "latest.pt")["model"]) == []


def test_best_snapshot_is_that_of_the_best_evaluation(example: ModuleType, tmp_path: Path) -> None:
    (run,) = run_ranks([tmp_path], "--epochs", 6, "--lr", 0.05)
    printed = re.findall(r"^epoch \d: test accuracy (0\.\d{4})$", run.stdout, re.MULTILINE)
    assert len(printed) == 6
    assert printed[-1] != max(printed), "choose another --lr: the best epoch must not be the last"
    best = load(tmp_path / "best.pt")
    assert best["step"] == 23 * (printed.index(max(printed)) + 1)
    assert f"{best['best']:.4f}" == max(printed)
    assert status(tmp_path)["best_accuracy"] == load(tmp_path / "latest.pt")["best"] == best["best"]

    model = example.build_model().double()
    model.load_state_dict(best["model"])
    images, labels = example.build_data()[1].tensors
    correct = (model(images.double()).argmax(1) == labels).sum().item()
    assert correct / len(labels) == best["best"]


def test_a_finished_run_is_reported_again_without_training(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    """And handlers of atexit run, on which loggers rely."""
    out = copied(trained(1, "--epochs", 2), tmp_path / "out")
    code = f"import atexit; atexit.register(print, 'sent')\n{IN_FLOAT64}"
    (run,) = launch.succeeded([start("-c", code, SCRIPT, "--epochs", 2, "--out", out)])
    best = load(out / "best.pt")["best"]
    assert run.stdout.splitlines() == [
        f"{out}: continuing after step 46, with --lr 0.006",
        f"finished after step 46 of 46, best test accuracy {best:.4f}",
        "sent",
    ]
    assert status(out) == {"state": "finished", "step": 46, "steps": 46, "best_accuracy": best}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--epochs", 3, "--batch-size", 32],
            "of 135, trained with {'batch_size': 64}; use that, or another --out",
        ),
        (["--epochs", 1], "of 23, trained with more epochs; use that, or another --out"),
    ],
)
def test_snapshot_of_another_run_is_refused(
    trained: Callable[..., Path], tmp_path: Path, options: list[object], expected: str
) -> None:
    out = copied(trained(1, "--epochs", 2), tmp_path / "out")
    (run,) = launch.wait(*start_ranks([out], *options))
    assert run.code == 1
    assert run.stderr.startswith(f"{out}: step 46 of ")
    assert expected in run.stderr
    assert "Traceback" not in run.stderr
    assert load(out / "latest.pt")["step"] == 46


def test_loss_that_is_not_finite_ends_all_ranks(tmp_path: Path) -> None:
    runs = launch.wait(*start_ranks([tmp_path] * 2, "--lr", 1e300, "--epochs", 2))
    assert [run.code for run in runs] == [1] * 2
    for run in runs:
        assert re.search(r"^step \d+: the loss is not finite, try a lower --lr$", run.stderr, re.MULTILINE)
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("flag", "value"), [("--epoch", 3), ("--lr", "nan"), ("--out", "/dev/null/runs")])
def test_wrong_flags_are_usage_errors(flag: str, value: object) -> None:
    (run,) = launch.wait(start(SCRIPT, flag, value, "--epochs", 1))
    assert (run.code, flag in run.stderr) == (2, True)
    assert "Traceback" not in run.stderr


def test_ctrl_c_stops_all_ranks_at_one_step_with_a_snapshot(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group: here to the ranks and the processes that load data for
    them."""
    runs = start_ranks([tmp_path] * 2, *ENDLESS, "--save-every", 1, "--workers", 1)
    wait_for_snapshot(tmp_path, runs)
    for run in runs:
        run.signal_session(signal.SIGINT)
    launch.wait(*runs)
    assert [run.code for run in runs] == [130] * 2, "".join(run.stderr for run in runs)
    assert "Traceback" not in "".join(run.stderr for run in runs)
    assert status(tmp_path)["state"] == "preempted"
    assert load(tmp_path / "latest.pt")["step"] == status(tmp_path)["step"] > 0
