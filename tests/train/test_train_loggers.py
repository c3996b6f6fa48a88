"""--wandb, with a stand-in for the package that records its calls in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.training import launch
from support.training.output import read_metrics, read_status

from train.record.output import RunOutput

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_options")]
TINY = (*launch.TINY, "--log-every", 2, "--wandb", "digits-and-more")
STAND_IN = """
import json, os, pathlib, signal
from types import SimpleNamespace

if "MISSING" in os.environ:
    raise ImportError

calls = pathlib.Path(os.environ["CALLS"])

def record(call, **values):
    with calls.open("a") as file:
        file.write(json.dumps({"call": call, "rank": os.environ.get("RANK", "0"), **values}) + "\\n")

def fail(call):
    if call in os.environ.get("RAISE", "").split():
        raise RuntimeError(f"no answer to {call}\\nmore")

class Run:
    def log(self, numbers, step):
        record("log", step=step, numbers=numbers)
        if os.environ.get("STOP_AT") == str(step):
            os.kill(os.getpid(), signal.SIGTERM)
        fail("log")

    def mark_preempting(self):
        record("mark_preempting")
        fail("mark_preempting")

    def finish(self, exit_code=None):
        record("finish", exit_code=exit_code)
        fail("finish")

def init(**values):
    if "REFUSE" in os.environ:
        raise RuntimeError("api_key not configured (no-tty)\\nmore")
    record("init", **values)
    return Run()

util = SimpleNamespace(generate_id=lambda: f"id-{os.getpid()}")
"""


@pytest.fixture
def wandb(tmp_path: Path) -> dict[str, object]:
    """The environment of a run that finds the stand-in."""
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    return {"PYTHONPATH": package.parent, "CALLS": tmp_path / "calls"}


def calls(wandb: dict[str, object]) -> list[dict[str, Any]]:
    """Return the calls since the last time."""
    path = Path(str(wandb["CALLS"]))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return lines


def test_rank_0_logs_each_line_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, wandb: dict[str, object]
) -> None:
    out = tmp_path / "out"
    launch.succeeded(launch.train_ranks(2, *TINY, "--out", out, "--max-steps", 4, **wandb))
    first = calls(wandb)
    launch.succeeded(launch.train_ranks(2, *TINY, "--out", out, **wandb))
    second = calls(wandb)
    assert {call["rank"] for call in first + second} == {"0"}
    for part in (first, second):
        begun, *logged, ended = part
        assert (begun["call"], begun["project"], begun["dir"]) == ("init", "digits-and-more", str(out))
        assert (begun["config"]["lr"], begun["config"]["batch_size"]) == (0.1, 8)
        assert {call["call"] for call in logged} == {"log"}
        assert (ended["call"], ended["exit_code"]) == ("finish", 0)
    assert [call["step"] for call in first[1:-1]] == [2, 4, 4]
    assert [call["step"] for call in second[1:-1]] == [5, 5, 6, 8, 10, 10]
    assert first[0]["id"] == second[0]["id"]
    assert second[0]["resume"] == "allow"
    (line,) = (line for line in read_metrics(out, "epoch") if line["step"] == 10)
    numbers = second[-2]["numbers"]
    assert numbers == {f"epoch/{name}": line[name] for name in line if name not in ("kind", "step", "time")}
    launch.succeeded([launch.start_train(*TINY, "--out", out, "--fresh", "--epochs", 1, **wandb)])
    assert calls(wandb)[0]["id"] != first[0]["id"]


def test_failed_and_stopped_runs_are_finished_as_such(tmp_path: Path, wandb: dict[str, object]) -> None:
    """Even where the service does not answer."""
    failed = launch.start_train(*TINY, "--out", tmp_path / "failed", "--lr", "1e30", **wandb)
    assert failed.wait() == 1
    assert [call["exit_code"] for call in calls(wandb) if call["call"] == "finish"] == [1]
    raising = {"STOP_AT": 2, "RAISE": "mark_preempting"}
    stopped = launch.start_train(*TINY, "--out", tmp_path / "stopped", **wandb, **raising)
    assert stopped.wait() == 143, stopped.stderr
    assert "train: wandb: cannot end the run: no answer to mark_preempting\n" in stopped.stderr
    assert [call["call"] for call in calls(wandb)] == ["init", "log", "mark_preempting", "finish"]
    assert read_status(tmp_path / "stopped")["state"] == "preempted"
    again = launch.start_train(*TINY, "--out", tmp_path / "stopped", **wandb)
    launch.succeeded([again])
    assert read_status(tmp_path / "stopped")["state"] == "finished"


def test_link_in_the_place_of_the_id_does_not_change_a_file_elsewhere(
    tmp_path: Path, wandb: dict[str, object]
) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.write_text("precious")
    (out / "wandb-id.txt").symlink_to(precious)
    launch.succeeded([launch.start_train(*TINY, "--epochs", 1, "--out", out, **wandb)])
    assert precious.read_text() == "precious"
    assert (out / "wandb-id.txt").read_text() == calls(wandb)[0]["id"] + "\n"


def test_every_logger_is_closed_though_the_first_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Service:
        name = "service"

        def __init__(self, *, fails: bool) -> None:
            self.fails = fails
            self.calls: list[str] = []

        def log(self, _kind: str, _step: int, _numbers: Mapping[str, float]) -> None:
            self._called("log")

        def close(self, _exit_code: int) -> None:
            self._called("close")

        def _called(self, call: str) -> None:
            self.calls.append(call)
            if self.fails:
                raise OSError

    services = [Service(fails=True), Service(fails=False)]
    output = RunOutput(tmp_path, enabled=True, loggers=lambda _step: services)
    output.open(0)
    for step in (1, 2):
        output.record("train", step=step, loss=0.5)
    output.close()
    assert [one.calls for one in services] == [["log", "close"], ["log", "log", "close"]]
    assert capsys.readouterr().err.splitlines() == [
        "train: service: cannot log: OSError; the run continues without it",
        "train: service: cannot end the run: OSError",
    ]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MISSING": 1}, "--wandb needs the package wandb: pip install wandb, or remove it"),
        (
            {"REFUSE": 1},
            "--wandb digits-and-more: cannot start a run (api_key not configured (no-tty)); run `wandb "
            "login`",
        ),
    ],
    ids=["missing", "refused"],
)
def test_refused_logger_ends_every_rank_before_training(
    tmp_path: Path, wandb: dict[str, object], environment: dict[str, object], message: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("of an earlier run\n")
    ranks = launch.wait(*launch.train_ranks(2, *TINY, "--out", out, **wandb, **environment))
    (first,), (other,) = (rank.stderr.splitlines() for rank in ranks)
    assert first.startswith(f"train: rank 0: {message}")
    assert other == "train: rank 1: stopped because another rank could not open the output files"
    assert [rank.code for rank in ranks] == [2, 2]
    assert (out / "metrics.jsonl").read_text() == "of an earlier run\n"
