"""Best weights, evaluation alone, weights to begin with, frozen layers, traces, step limits, and flags that
change on resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch
from support.training.output import differing_paths, read_metrics, read_snapshot, read_status, read_weights

from train import models, pretrained
from train.errors import UsageError

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_options")]


TINY = (*launch.TINY, "--epochs", 4)


def run(out: Path, *flags: object) -> launch.Run:
    return launch.wait(launch.start_train(*TINY, "--out", out, *flags))[0]


def trained(out: Path, *flags: object) -> str:
    done = run(out, *flags)
    assert done.code == 0, done.stderr
    return done.stdout


def best(out: Path, name: str = "best.pt") -> dict[str, Any]:
    return torch.load(out / name, weights_only=True)


def test_best_weights_are_those_of_the_best_evaluation(tmp_path: Path) -> None:
    trained(tmp_path, "--best-metric", "loss")
    losses = {line["step"]: line["test_loss"] for line in read_metrics(tmp_path, "epoch")}
    kept = best(tmp_path)
    assert kept["value"] == min(losses.values()) == losses[kept["step"]]
    assert (kept["metric"], read_status(tmp_path)["best_loss"]) == ("loss", kept["value"])
    shown = run(tmp_path, "--evaluate")
    assert shown.code == 0, shown.stderr
    assert float(re.search(r"test loss (\S+)", shown.stdout)[1]) == pytest.approx(kept["value"], rel=1e-5)
    assert len(read_metrics(tmp_path, "epoch")) == 4  # nothing of the run has changed


def test_best_of_several_evaluations_within_epochs_are_kept(tmp_path: Path) -> None:
    flags = ("--best-metric", "loss", "--keep-best", 3, "--eval-every", 2)
    trained(tmp_path, *flags)
    lines = [*read_metrics(tmp_path, "evaluation"), *read_metrics(tmp_path, "epoch")]
    assert len(lines) == 4 * 2 + 4
    ranked = sorted(lines, key=lambda line: (line["test_loss"], line["step"]))[:3]
    assert {path.name for path in tmp_path.glob("best*")} == {
        "best.pt",
        *(f"best-step-{line['step']}.pt" for line in ranked),
    }
    assert best(tmp_path)["step"] == ranked[0]["step"]
    assert best(tmp_path, f"best-step-{ranked[2]['step']}.pt")["value"] == ranked[2]["test_loss"]
    trained(tmp_path, *flags, "--fresh", "--epochs", 1, "--keep-best", 1)
    assert [path.name for path in tmp_path.glob("best*")] == ["best.pt"]


def test_best_weights_continue_after_a_run_has_stopped_at_max_steps(tmp_path: Path) -> None:
    """Those of evaluations that no snapshot knows, or that are no longer kept, are removed."""
    flags = ("--best-metric", "loss", "--eval-every", 2)
    trained(tmp_path / "whole", *flags, "--keep-best", 3)
    trained(tmp_path / "parts", *flags, "--keep-best", 3, "--max-steps", 12)
    assert [line["step"] for line in read_metrics(tmp_path / "parts", "epoch")] == [5, 10, 12]
    assert (read_snapshot(tmp_path / "parts")["step"], read_status(tmp_path / "parts")["steps"]) == (12, 12)
    # Of an evaluation after the last snapshot, which this run may not repeat.
    (tmp_path / "parts" / "best-step-14.pt").write_bytes(b"lost")
    trained(tmp_path / "parts", *flags, "--keep-best", 3)
    names = {path.name for path in (tmp_path / "whole").glob("best*")}
    assert len(names) == 4
    assert {path.name for path in (tmp_path / "parts").glob("best*")} == names
    assert all(
        differing_paths(best(tmp_path / "whole", name), best(tmp_path / "parts", name)) == []
        for name in names
    )
    assert differing_paths(read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")) == []
    before = best(tmp_path / "parts")
    # So small a learning rate that no evaluation is better.
    trained(tmp_path / "parts", *flags, "--keep-best", 1, "--epochs", 5, "--lr", "1e-30")
    assert [path.name for path in (tmp_path / "parts").glob("best*")] == ["best.pt"]
    assert differing_paths(best(tmp_path / "parts"), before) == []


def test_best_weights_of_which_no_snapshot_knows_are_adopted(tmp_path: Path) -> None:
    """The run is killed after an evaluation, before its next snapshot, and resumed on another path, which
    keeps more of them."""
    flags = ("--best-metric", "loss")
    crashed = run(tmp_path, *flags, "--eval-every", 2, "--fail-rank", 0, "--fail-step", 10)
    assert crashed.code == 1
    written = best(tmp_path)
    assert (written["step"], read_snapshot(tmp_path)["step"]) == (8, 5)
    # So small a learning rate that no evaluation is better.
    trained(tmp_path, *flags, "--lr", "1e-30", "--keep-best", 2)
    assert differing_paths(best(tmp_path), written) == []
    assert differing_paths(best(tmp_path, f"best-step-{written['step']}.pt"), written) == []
    status = read_status(tmp_path)
    assert (status["best_loss"], status["best_epoch"]) == (written["value"], written["epoch"])
    assert len({*tmp_path.glob("best-step-*.pt")}) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--profile", "21:30"), "train: rank 0: --profile 21:30: the run has only 20 steps"),
        (("--resume", "require"), "no rank has a valid snapshot"),
        (("--device", "cuda"), "finds no GPU"),
        (("--init-method", "file:///no/such", "--world-size", 2, 0, 0), "the folder does not exist"),
        (
            ("--init-method", "tcp://nohost:99999", "--world-size", 2, 0, 0),
            "invalid rendezvous address (Port out",
        ),
    ],
)
def test_refusals_are_one_sentence(tmp_path: Path, flags: tuple[object, ...], message: str) -> None:
    refused = run(tmp_path / "out", *flags)
    assert refused.code == 2, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["conv9"], "choose from conv1, conv2, fc1, fc2"),
        ([""], "--freeze : no layer with parameters has this name"),
        (["conv1", "conv2", "fc1", "fc2"], "nothing would be left to train"),
    ],
)
def test_layers_that_cannot_be_frozen_are_refused(layers: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pretrained.freeze(models.small(1, 8, 8, 4), layers)


def test_fine_tuning_loads_what_fits_and_leaves_frozen_layers(tmp_path: Path) -> None:
    trained(tmp_path / "first", "--epochs", 1)
    weights = best(tmp_path / "first")["model"]
    state = {name: value for name, value in weights.items() if not name.startswith("fc2")}
    torch.save({**state, "fc2.weight": torch.zeros(3, 64)}, tmp_path / "weights.pt")
    output = trained(
        tmp_path / "second", "--weights", tmp_path / "weights.pt", "--freeze", "conv1,conv2", "--epochs", 1
    )
    assert "loaded 6 of 8 tensors; new: fc2.weight, fc2.bias" in output
    after = read_weights(tmp_path / "second")
    assert torch.equal(after["conv1.weight"], weights["conv1.weight"])
    assert not torch.equal(after["fc1.weight"], weights["fc1.weight"])
    assert read_snapshot(tmp_path / "second")["optimizer"]["state"].keys() == {
        f"{layer}.{name}" for layer in ("fc1", "fc2") for name in ("weight", "bias")
    }
    shown = trained(tmp_path / "third", "--evaluate", "--weights", tmp_path / "first" / "best.pt")
    assert f"test accuracy {best(tmp_path / 'first')['value']:.6g}" in shown


def test_each_rank_writes_a_trace_of_the_chosen_steps(tmp_path: Path) -> None:
    launch.succeeded(launch.train_ranks(2, *TINY, "--out", tmp_path, "--profile", "2:3"))
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
        assert names.count("aten::cross_entropy_loss") == 2


def test_changed_flags_are_reported_and_refused_where_nothing_is_left_to_train(tmp_path: Path) -> None:
    trained(tmp_path, "--epochs", 1)
    kept = (tmp_path / "best.pt").read_bytes()
    refused = run(tmp_path, "--epochs", 1, "--best-metric", "loss")
    assert (refused.code, "--best-metric" in refused.stderr) == (2, True)
    trained(tmp_path, "--epochs", 1)  # is complete
    assert (tmp_path / "best.pt").read_bytes() == kept
    before = (tmp_path / "snapshot.pt").read_bytes()
    refused = run(tmp_path, "--epochs", 1, "--lr", 5)
    assert refused.code == 2
    assert "is complete, and was trained with other flags: --lr 5.0 (was 0.1)" in refused.stderr
    assert (tmp_path / "snapshot.pt").read_bytes() == before
    output = trained(tmp_path, "--epochs", 2, "--lr", 0.05)
    assert "resuming with other flags than before: --epochs 2 (was 1), --lr 0.05 (was 0.1)" in output
