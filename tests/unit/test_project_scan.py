"""What `init` sees in projects of the usual forms, as a table."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from support.localsync import put

from cloudddp.job.project_scan import ScanResult, named_by, scan

DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
def main():
    dist.init_process_group("nccl"); torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = open("data/train.csv")
    torch.save({}, "checkpoints/last.pt")
if __name__ == "__main__": main()
"""
HUGGING_FACE = """
import argparse
from transformers import Trainer, TrainingArguments
parser = argparse.ArgumentParser(); parser.add_argument("--output_dir", default="out/model")
Trainer(args=TrainingArguments(output_dir="/mnt/ckpt")).train()
"""
LIGHTNING = """
from lightning.pytorch.cli import LightningCLI
from lightning import Trainer
Trainer(default_root_dir=f"logs/{1}")
LightningCLI()
"""
MODEL = "import torch\nclass Model(torch.nn.Module): pass\n"


def project(folder: Path, files: dict[str, str]) -> Path:
    put(folder, {**files})
    return folder


@pytest.mark.parametrize(
    ("files", "scripts"),
    [
        ({"train.py": DDP, "model.py": MODEL}, ["train.py"]),
        ({"src/finetune.py": HUGGING_FACE, "src/model.py": MODEL}, ["src/finetune.py"]),
        ({"cli.py": LIGHTNING}, ["cli.py"]),
        ({"tests/test_train.py": DDP, "setup.py": DDP, ".venv/x.py": DDP, "broken.py": "def ("}, []),
        ({"env/pyvenv.cfg": "", "env/train.py": DDP, "my/pyvenv.cfg": "", "my/train.py": DDP}, []),
        ({"legacy_train.py": DDP, "train.py": DDP}, ["train.py", "legacy_train.py"]),
        ({"evaluate.py": f"import argparse{DDP}", "go.py": DDP}, ["go.py", "evaluate.py"]),
    ],
)
def test_entry_scripts(tmp_path: Path, files: dict[str, str], scripts: list[str]) -> None:
    assert [one.path for one in scan(project(tmp_path, files)).scripts] == scripts


LIB = {"src/mylm/data.py": ""}
OWN = f"import datasets, json\nfrom mylm.data import x{DDP}"


@pytest.mark.parametrize(
    ("files", "start", "modules"),
    [
        ({"train.py": DDP, "model.py": MODEL}, "train.py", ""),
        ({**LIB, "src/mylm/train.py": f"from .data import x{DDP}"}, "-m mylm.train", "src"),
        ({"a/__init__.py": "", "a/b/__main__.py": f"from ..c import x{DDP}"}, "-m a.b", ""),
        ({**LIB, "scripts/train.py": OWN}, "scripts/train.py", "src"),
        ({**LIB, "train.py": OWN, "requirements.txt": "-r a.txt", "a.txt": "mylm\n"}, "train.py", ""),
        ({"mylm.py": "", "scripts/[x]/train.py": OWN}, "'scripts/[x]/train.py'", "."),
        ({"a/train.py": OWN, "datasets/a.py": "", "requirements.txt": "datasets==4\n"}, "a/train.py", ""),
    ],
)
def test_how_the_script_is_started_and_finds_modules_of_the_project(
    tmp_path: Path, files: dict[str, str], start: str, modules: str
) -> None:
    found = scan(project(tmp_path, files))
    assert (shlex.join(found.start), found.modules) == (start, modules)


@pytest.mark.parametrize(
    ("files", "environment"),
    [
        (("requirements.txt",), "requirements.txt"),
        (("requirements.txt", "uv.lock"), "uv.lock"),
        (("environment.yml",), "environment.yml"),
        (("pyproject.toml",), ""),  # without dependencies
        ((), ""),
    ],
)
def test_file_of_packages(tmp_path: Path, files: tuple[str, ...], environment: str) -> None:
    assert scan(project(tmp_path, dict.fromkeys(files, "x = 1\n"))).environment == environment


def test_where_scripts_save(tmp_path: Path) -> None:
    dependencies = {"pyproject.toml": '[project]\nname = "x"\ndependencies = ["torch"]\n'}
    scripts = {"train.py": DDP, "hf.py": HUGGING_FACE, "cli.py": LIGHTNING}
    found = scan(project(tmp_path, dependencies | scripts))
    assert found.environment == "pyproject.toml"
    assert found.saved == {"checkpoints": "train.py", "out": "hf.py", "logs": "cli.py"}
    assert found.outside == {"/mnt/ckpt": "hf.py"}


def test_ignored_folder_that_the_script_names(tmp_path: Path) -> None:
    found = scan(project(tmp_path, {"train.py": DDP}), ["data/", "wandb/", "notes.txt", "dat/"])
    assert found.data == ("data",)


def test_folder_in_which_a_script_saves_is_no_data(tmp_path: Path) -> None:
    """Nor is what tools make: sent as data, it would be no result."""
    names = "data/ sets/one/ checkpoints/ wandb/ lightning_logs/ .venv/ results/ my_runs/ ~odd/ ".split()
    reads = "\n".join(f'open("{name}x")' for name in [*names, "line\\nbreak/"])
    (tmp_path / "train.py").write_text(
        f"import torch\nfrom torch.nn.parallel import DistributedDataParallel\n{reads}\n"
        'torch.save({}, "keeps/a.pt")\nopen("keeps/a.pt")\nif __name__ == "__main__": pass\n'
    )
    ignored = [*names, "keeps/", "line\nbreak/"]
    assert scan(tmp_path, ignored).data == ("data", "sets/one")
    assert named_by(tmp_path, "train.py", (), ignored) == ["data/", "sets/one/"]


@pytest.mark.parametrize(
    ("path", "saved", "outside"),
    [
        ("s3://bucket/x.pt", [], []),
        ("$HOME/x.pt", [], []),
        ("C:\\\\x.pt", [], []),
        (".", [], []),
        ("a/../../b/x.pt", [], ["a/../../b/x.pt"]),
        ("..", [], [".."]),
        ("~/x.pt", [], ["~/x.pt"]),
        ("./out/x.pt", ["out"], []),
    ],
)
def test_where_a_script_saves(tmp_path: Path, path: str, saved: list[str], outside: list[str]) -> None:
    (tmp_path / "train.py").write_text(
        f'import torch\ntorch.save({{}}, "{path}")\nif __name__ == "__main__": DistributedDataParallel\n'
    )
    found = scan(tmp_path)
    assert (list(found.saved), list(found.outside)) == (saved, outside)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    (tmp_path / "pyproject.toml").symlink_to("/dev/zero")
    with (tmp_path / "huge.py").open("wb") as file:
        file.truncate(1 << 40)
    assert scan(tmp_path) == ScanResult()
