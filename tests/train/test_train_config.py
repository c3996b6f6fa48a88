"""Flags: what they mean, what is refused, and that a refusal is one sentence which says what is allowed."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest
import train_harness as harness

from train.config import DATASETS, RECIPES, Config, make, parse
from train.errors import UsageError

MAIN = harness.ROOT / "train" / "main.py"


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_dataset_brings_its_own_recipe(dataset: str) -> None:
    config = parse(["--dataset", dataset])
    assert {name: getattr(config, name) for name in RECIPES[dataset]} == RECIPES[dataset]
    assert str(config.folder) == f"runs/{dataset}"


def test_a_flag_beats_the_recipe() -> None:
    config = parse(["--dataset", "digits", "--lr", "0.5", "--model", "linear", "--out", "here"])
    assert (config.lr, config.model, str(config.folder)) == (0.5, "linear", "here")


@pytest.mark.parametrize(
    "argv", [["3", "1"], ["--epochs", "2", "3", "1"], ["3", "1", "--epochs", "2"], ["--fresh", "3", "1"]]
)
def test_rank_and_local_rank_may_stand_beside_the_flags(argv: list[str]) -> None:
    assert tuple(parse(argv).place) == (3, 1)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--dataset", "cifar"], "digits, mnist, stl10, toy, synthetic"),
        (["--model", "vgg"], "small, mnist, resnet18, resnet50, linear"),
        (["--optimizer", "lion"], "sgd, adadelta, adamw"),
        (["--parallel", "tensor"], "ddp, fsdp, pipeline, gpipe, 1f1b"),
        (["--parallel", "gpipe", "--batch-size", "30"], "cannot be divided into 4 equal microbatches"),
        (["--parallel", "1f1b", "--accumulate", "3"], "cannot be divided into 12 equal microbatches"),
        (["--amp", "fp16", "--parallel", "fsdp"], "give --amp bf16"),
        (["--snapshot", "sharded", "--parallel", "gpipe"], "leave it at full"),
        (["--snapshot", "sharded", "--snapshot-per-node"], "shared storage"),
        (["--spawn", "2", "1", "1"], "leave RANK LOCAL_RANK out"),
        (["--spawn", "2", "--world-size", "3"], "leave --world-size out"),
        (["--cuts", "fc2"], "does nothing with --parallel ddp, only with pipeline, gpipe, 1f1b"),
        (["--static-graph", "--parallel", "fsdp"], "does nothing with --parallel fsdp"),
        (["--image-size", "32"], "does nothing with --dataset digits"),
        (["--split-size", "4"], "does nothing with --parallel ddp, only with pipeline"),
        (["--on-device", "--workers", "2"], "--workers has nothing to read with --on-device"),
        (["--batchsize", "4"], "did you mean --batch-size?"),
        (["--batchsize=4"], "did you mean --batch-size?"),
        (["--no-such"], "--help lists the flags"),
        (["--resume", "snapshot.pt"], "--resume snapshot.pt: must be one of auto, require"),
        (["--label-smoothing", "0.1", "--dataset", "toy"], "does nothing with --dataset toy"),
        (["--static-graph", "--accumulate", "2"], "leave one of them out"),
        (["--fused", "--optimizer", "sgd", "--parallel", "fsdp"], "choose adamw"),
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
        (["--accumulate", "65"], "more parts than a batch has samples (64)"),
        (["--fail-code", "256"], "below 256"),
        (["--init-method", "udp://x"], "env://, tcp:// or file://"),
        (["--epoch", "3"], "--epoch"),
        (["3"], "RANK LOCAL_RANK"),
        (["3", "x"], "x"),
        (["--fresh", "--resume", "require"], "contradict"),
    ],
)
def test_bad_flags_are_refused_with_what_is_allowed(argv: list[str], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(argv)
    assert told in str(refused.value)


def test_a_refusal_is_one_line_and_exit_code_2_and_comes_before_torch() -> None:
    done = harness.python("-X", "importtime", MAIN, "--dataset", "cifar")
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout) == (2, "")
    assert said == [
        "train: --dataset cifar: there is no such dataset; choose from digits, mnist, stl10, toy, synthetic"
    ]
    assert not re.search(r"\|\s+torch$", done.stderr, re.MULTILINE)


def test_only_one_rank_of_a_node_reports_a_bad_flag() -> None:
    done = harness.python(MAIN, "--lr", "-1", RANK=1, LOCAL_RANK=1, WORLD_SIZE=2)
    assert (done.returncode, done.stderr) == (2, "")


def test_help_names_every_flag() -> None:
    done = harness.python(MAIN, "--help")
    assert done.returncode == 0
    for field in dataclasses.fields(Config):
        assert field.name == "place" or "--" + field.name.replace("_", "-") in done.stdout
    assert done.stdout.startswith("usage: train/main.py [--FLAG VALUE ...] [RANK LOCAL_RANK]\n")
    headings = re.findall(r"^(\S.*):$", done.stdout, re.MULTILINE)
    assert headings[-6:] == [
        f.metadata["section"] for f in dataclasses.fields(Config) if "section" in f.metadata
    ]


def manual() -> list[str]:
    return (harness.ROOT / "docs" / "training.md").read_text(encoding="utf-8").splitlines()


def test_the_manual_lists_every_flag_with_its_default_and_no_other() -> None:
    expected = []
    for field in dataclasses.fields(Config):
        default = field.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        text = field.metadata.get("help", "") + "".join(
            f"; one of {', '.join(field.metadata['choices'])}" for _ in range("choices" in field.metadata)
        )
        expected.append(f"| `--{field.name.replace('_', '-')}` | {default} | {text} |")
    assert [line for line in manual() if line.startswith("| `--")] == expected[:-1]


def test_the_manual_shows_the_recipes_as_they_are() -> None:
    for name, recipe in RECIPES.items():
        shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in recipe.values()]
        assert f"| {' | '.join([name, *shown])} |" in manual()


def test_every_trap_names_tests_that_exist_or_says_why_there_is_none() -> None:
    listed = (harness.ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    rows = [line for line in listed.splitlines() if line.startswith("| ") and not line.startswith("| trap ")]
    sources = (harness.ROOT / "tests").glob("*/test_*.py")
    existing = {
        name
        for path in sources
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert rows
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert set(named) <= existing, row
        assert named or "not tested" in row, row


def test_the_trainer_imports_nothing_of_the_launcher() -> None:
    for path in (harness.ROOT / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("cloudddp", "infra")], path


def test_a_value_out_of_its_limits_is_refused_also_without_the_command_line() -> None:
    with pytest.raises(UsageError, match="--timeout"):
        make(dataset="digits", timeout=0.0)
