"""Flags: what they mean, what is refused, and that a refusal is one sentence that says what is allowed."""

from __future__ import annotations

import dataclasses
import re

import pytest
from support.training import launch

from train.cli import flag_name, is_positional
from train.config import DATASETS, RECIPES, Config, make, parse
from train.errors import UsageError


@pytest.mark.parametrize("dataset", DATASETS)
def test_dataset_has_its_own_defaults(dataset: str) -> None:
    config = parse(["--dataset", dataset])
    assert {name: getattr(config, name) for name in RECIPES[dataset]} == RECIPES[dataset]
    assert str(config.folder) == f"runs/{dataset}"


def test_flag_overrides_the_recipe() -> None:
    config = parse(["--dataset", "digits", "--lr", "0.5", "--model", "linear", "--out", "here"])
    assert (config.lr, config.model, str(config.folder)) == (0.5, "linear", "here")


@pytest.mark.parametrize(
    "argv", [["3", "1"], ["--epochs", "2", "3", "1"], ["3", "1", "--epochs", "2"], ["--fresh", "3", "1"]]
)
def test_rank_and_local_rank_may_come_before_or_after_flags(argv: list[str]) -> None:
    assert tuple(parse(argv).position) == (3, 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset", "cifar"], "digits, mnist, stl10, toy, synthetic"),
        (["--model", "vgg"], "small, mnist, resnet18, resnet50, linear"),
        (["--optimizer", "lion"], "sgd, adadelta, adamw"),
        (["--parallel", "tensor"], "ddp, fsdp, pipeline, gpipe, 1f1b"),
        (["--parallel", "gpipe", "--batch-size", "30"], "cannot be divided into 4 equal microbatches"),
        (["--parallel", "1f1b", "--accumulate", "3"], "cannot be divided into 12 equal microbatches"),
        (["--amp", "fp16", "--parallel", "fsdp"], "use --amp bf16"),
        (["--snapshot", "sharded", "--parallel", "gpipe"], "not gpipe: use full"),
        (["--snapshot", "sharded", "--snapshot-per-node"], "shared storage"),
        (["--spawn", "2", "1", "1"], "remove RANK LOCAL_RANK"),
        (["--spawn", "2", "--world-size", "3"], "remove --world-size"),
        (["--cuts", "fc2"], "has no effect with --parallel ddp, only with pipeline, gpipe, 1f1b"),
        (["--static-graph", "--parallel", "fsdp"], "has no effect with --parallel fsdp"),
        (["--image-size", "32"], "has no effect with --dataset digits"),
        (["--split-size", "4"], "has no effect with --parallel ddp, only with pipeline"),
        (["--on-device", "--workers", "2"], "--workers has no effect with --on-device"),
        (["--batchsize", "4"], "did you mean --batch-size?"),
        (["--batchsize=4"], "did you mean --batch-size?"),
        (["--no-such"], "see --help"),
        (["--resume", "snapshot.pt"], "--resume snapshot.pt: must be one of auto, require"),
        (["--label-smoothing", "0.1", "--dataset", "toy"], "has no effect with --dataset toy"),
        (["--static-graph", "--accumulate", "2"], "remove one of them"),
        (["--fused", "--optimizer", "sgd", "--parallel", "fsdp"], "use adamw"),
        (["--timeout", "1e15"], "below 1000000"),
        (["--warmup-epochs", "1e308"], "below 1000000"),
        (["--bucket-mb", "1000000000000000"], "below 1048576"),
        (["--epochs", "0"], "at least 1"),
        (["--epochs", "many"], "--epochs"),
        (["--batch-size", "-4"], "at least 1"),
        (["--lr", "0"], "above 0"),
        (["--lr", "nan"], "finite"),
        (["--momentum", "1"], "below 1"),
        (["--lr", "1e200"], "below 1e+38"),
        (["--accumulate", "65"], "more parts than samples in a batch (64)"),
        (["--fail-code", "256"], "below 256"),
        (["--init-method", "udp://x"], "env://, tcp:// or file://"),
        (["--epoch", "3"], "--epoch"),
        (["3"], "RANK LOCAL_RANK"),
        (["3", "x"], "x"),
        (["--fresh", "--resume", "require"], "contradict"),
    ],
)
def test_bad_flags_are_refused_with_advice(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(argv)
    assert message in str(refused.value)


def test_refusal_is_one_line_with_exit_code_2_before_torch_is_imported() -> None:
    run = launch.start_cold("-X", "importtime", launch.MAIN, "--dataset", "cifar")
    assert (run.wait(), run.stdout) == (2, "")
    errors = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert errors == [
        "train: --dataset cifar: unknown dataset; choose from digits, mnist, stl10, toy, synthetic"
    ]
    assert not re.search(r"\|\s+torch$", run.stderr, re.MULTILINE)


def test_only_one_rank_of_a_node_reports_a_bad_flag() -> None:
    run = launch.start_cold(launch.MAIN, "--lr", "-1", RANK=1, LOCAL_RANK=1, WORLD_SIZE=2)
    assert (run.wait(), run.stderr) == (2, "")


def test_help_names_every_flag() -> None:
    run = launch.start_cold(launch.MAIN, "--help")
    assert run.wait() == 0
    for field in dataclasses.fields(Config):
        assert is_positional(field) or flag_name(field) in run.stdout
    assert run.stdout.startswith("usage: train/main.py [--FLAG VALUE ...] [RANK LOCAL_RANK]\n")
    headings = re.findall(r"^(\S.*):$", run.stdout, re.MULTILINE)
    assert headings[-6:] == [
        f.metadata["section"] for f in dataclasses.fields(Config) if "section" in f.metadata
    ]


def manual() -> list[str]:
    return (launch.ROOT / "docs" / "training.md").read_text(encoding="utf-8").splitlines()


def test_manual_lists_every_flag_with_its_default() -> None:
    expected = []
    for field in dataclasses.fields(Config):
        default = field.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        text = field.metadata.get("help", "") + "".join(
            f"; one of {', '.join(field.metadata['choices'])}" for _ in range("choices" in field.metadata)
        )
        expected.append(f"| `{flag_name(field)}` | {default} | {text} |")
    assert [line for line in manual() if line.startswith("| `--")] == expected[:-1]


def test_manual_shows_the_recipes() -> None:
    for name, recipe in RECIPES.items():
        shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in recipe.values()]
        assert f"| {' | '.join([name, *shown])} |" in manual()


def test_value_out_of_its_limits_is_refused_without_the_command_line_too() -> None:
    with pytest.raises(UsageError, match="--timeout"):
        make(dataset="digits", timeout=0.0)
