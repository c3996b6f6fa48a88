"""Flags: what they mean, what is refused, and that a refusal is one sentence that says what is allowed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.training import launch

from train.cli import parse
from train.config import RECIPES, Config, flag, make
from train.distributed.rank_info import find_rank
from train.errors import UsageError
from train.flags import DATASETS
from train.main import main
from train.manual import flag_rows


@pytest.mark.parametrize("dataset", DATASETS)
def test_dataset_has_its_own_defaults(dataset: str) -> None:
    config = parse(["--dataset", dataset])
    assert {name: config.flags()[name] for name in RECIPES[dataset]} == RECIPES[dataset]
    assert str(config.folder) == f"runs/{dataset}"


def test_flag_overrides_the_recipe() -> None:
    config = parse(["--dataset", "digits", "--lr", "0.5", "--model", "linear", "--out", "here"])
    assert (config.optimization.lr, config.model.model, str(config.folder)) == (0.5, "linear", "here")


@pytest.mark.parametrize(
    "argv", [["3", "1"], ["--epochs", "2", "3", "1"], ["3", "1", "--epochs", "2"], ["--fresh", "3", "1"]]
)
def test_rank_and_local_rank_may_come_before_or_after_flags(argv: list[str]) -> None:
    assert tuple(parse(argv).position) == (3, 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--parallel", "tensor"], "use --dataset text"),
        (["--parallel", "gpipe", "--batch-size", "30"], "cannot be divided into 4 equal microbatches"),
        (["--parallel", "1f1b", "--accumulate", "3"], "cannot be divided into 12 equal microbatches"),
        (["--amp", "fp16", "--parallel", "fsdp"], "use --amp bf16"),
        (["--snapshot", "sharded", "--parallel", "gpipe"], "not gpipe: use full"),
        (["--snapshot", "sharded", "--snapshot-per-node"], "shared storage"),
        (["--spawn", "2", "1", "1"], "remove RANK LOCAL_RANK"),
        (["--spawn", "2", "--world-size", "3"], "remove --world-size"),
        (["--cuts", "fc2"], "has no effect with --parallel ddp, only with pipeline, gpipe, 1f1b"),
        (["--split-size", "4"], "has no effect with --parallel ddp, only with pipeline"),
        (["--on-device", "--workers", "2"], "--workers has no effect with --on-device"),
        (["--batchsize", "4"], "did you mean --batch-size?"),
        (["--no-such"], "see --help"),
        (["--label-smoothing", "0.1", "--dataset", "toy"], "has no effect with --dataset toy"),
        (["--data", "here"], "has no effect with --dataset digits, only with mnist, stl10, folder, own"),
        (["--momentum", "0.5"], "has no effect with --optimizer adamw, only with sgd"),
        (["--eps", "1e-3", "--dataset", "mnist"], "has no effect with --optimizer adadelta"),
        (["--lr-epochs", "3"], "has no effect with --scheduler cosine, only with step"),
        (["--prefetch", "4"], "has no effect without --workers"),
        (["--static-graph", "--accumulate", "2"], "remove one of them"),
        (["--fused", "--optimizer", "sgd", "--parallel", "fsdp"], "use adamw"),
        (["--timeout", "1e15"], "below 1000000"),
        (["--workers", "1025"], "--workers 1025: must be below 1025"),
        (["--workers", "2", "--prefetch", "99999999999"], "--prefetch 99999999999: must be below 1025"),
        (["--epochs", str(2**53)], "must be below 9007199254740992"),
        (["--lr-batch", "1", "--batch-size", "1" + "0" * 330], "must be below 9007199254740992"),
        (
            ["--lr-batch", "1", "--lr", "1e30", "--batch-size", "1000000000"],
            "--lr-batch 1: the learning rate becomes 1e+39, and must be below 1e+38",
        ),
        (["--epochs", "0"], "at least 1"),
        (["--epochs", "many"], "--epochs"),
        (["--lr", "0"], "above 0"),
        (["--lr", "nan"], "finite"),
        (["--momentum", "1"], "below 1"),
        (["--accumulate", "65"], "more parts than samples in a batch (64)"),
        (["--init-method", "udp://x"], "env://, tcp:// or file://"),
        (["3"], "RANK LOCAL_RANK"),
        (["digits"], "RANK LOCAL_RANK"),
        (["--min-lr", "0.1"], "must not be above --lr"),
        (["--min-lr", "0.001", "--scheduler", "none"], "has no effect with --scheduler none"),
        (["--profile", "5"], "must be FIRST:LAST"),
        (["--profile", "12:10"], "must be FIRST:LAST, for example 10:12"),
        (["--ema", "0.9", "--parallel", "gpipe"], "remove it"),
        (["--fresh", "--resume", "require"], "contradict"),
    ],
)
def test_bad_flags_are_refused_with_advice(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(argv)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("defaults", "argv", "message"),
    [
        ({"epoch": 3}, [], "defaults of this script: .*--epoch.*did you mean --epochs"),
        ({"epochs": "three"}, [], "defaults of this script: .*--epochs.*three"),
        ({"scheduler": "linear"}, [], "defaults of this script: .*linear"),
        ({"momentum": 0.5, "optimizer": "adamw"}, [], "defaults of this script: --momentum has no effect"),
        (
            {},
            ["--dataset", "digits"],
            "--dataset digits: this script has a dataset of its own; remove the flag",
        ),
        ({}, ["--model", "small"], "--model small: this script has a model of its own; remove the flag"),
        ({}, ["--parallel", "tensor", "--model", "transformer"], "this script has a model of its own"),
    ],
)
def test_defaults_of_a_script_are_checked(defaults: dict[str, object], argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(argv, defaults={"dataset": "own", "model": "own", **defaults})


def test_defaults_of_a_script_come_after_the_command_line_and_before_the_recipe() -> None:
    defaults = {"dataset": "text", "lr": 0.5, "epochs": 7, "betas": (0.5, 0.6), "decay_all": False}
    config = parse(["--epochs", "2"], defaults=defaults).flags()
    assert [config[name] for name in (*defaults, "optimizer")] == ["text", 0.5, 2, (0.5, 0.6), False, "adamw"]


def test_help_that_nobody_reads_to_its_end_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, launch.MAIN, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "")


def test_refusal_is_one_line_with_exit_code_2_before_torch_is_imported() -> None:
    run = launch.start_cold("-X", "importtime", launch.MAIN, "--dataset", "cifar")
    assert (run.wait(), run.stdout) == (2, "")
    errors = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert len(errors) == 1
    assert errors[0].startswith("train: ")
    assert "--dataset" in errors[0]
    assert "cifar" in errors[0]
    assert not re.search(r"\|\s+torch$", run.stderr, re.MULTILINE)


def test_only_one_rank_of_a_node_reports_a_bad_flag() -> None:
    run = launch.start_cold(launch.MAIN, "--lr", "-1", RANK=1, LOCAL_RANK=1, WORLD_SIZE=2)
    assert (run.wait(), run.stderr) == (2, "")


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--init-method", "tcp://127.0.0.1:1"], {}, "RANK LOCAL_RANK"),
        (["0", "0"], {"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        (["2", "0"], {"WORLD_SIZE": "2"}, "not in 0..1"),
        ([], {"RANK": "0"}, "WORLD_SIZE"),
    ],
)
def test_incomplete_rank_is_refused_with_advice(argv: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_rank(parse(argv), env)
    assert message in str(refused.value)


def test_spawn_under_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert main(["--dataset", "synthetic", "--spawn", "2"]) == 2
    assert capsys.readouterr().err.endswith("starts the ranks without torchrun: use one of the two\n")


def test_help_names_every_flag() -> None:
    run = launch.start_cold(launch.MAIN, "--help", COLUMNS=100)
    assert run.wait() == 0
    assert "default: )" not in run.stdout.replace("'", "")
    for name in Config().flags():
        assert flag(name) in run.stdout
    assert run.stdout.startswith("usage: train/main.py")


def manual() -> list[str]:
    return (launch.ROOT / "docs" / "training.md").read_text(encoding="utf-8").splitlines()


def test_manual_lists_every_flag_as_it_is() -> None:
    shown = [line for line in manual() if line.startswith("| `--")]
    assert shown == flag_rows()


def test_manual_shows_the_recipes() -> None:
    for name, recipe in RECIPES.items():
        if name != "own":
            values = ", ".join(
                f"`{flag(key)} {value:g}`" if isinstance(value, float) else f"`{flag(key)} {value}`"
                for key, value in recipe.items()
            )
            assert f"| {name} | {values} |" in manual()


def test_value_out_of_its_limits_is_refused_without_the_command_line_too() -> None:
    with pytest.raises(UsageError, match="--timeout"):
        make(dataset="digits", timeout=0.0)


def test_largest_numbers_are_accepted() -> None:
    config = make(dataset="synthetic", workers=1024, prefetch=1024, epochs=2**53 - 1, image_size=65536)
    assert (config.data.prefetch, config.optimization.epochs) == (1024, 2**53 - 1)
