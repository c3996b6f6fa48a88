"""examples/tutorials: each script runs as a process with the commands of its README, which are read from it.

`python` and `torchrun` become forks of a process that has imported torch; ports, the file for the rendezvous
and the folder are the test's own.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training import dataset_files, launch

from train import cli

FOLDER = launch.ROOT / "examples" / "tutorials"
pytestmark = [
    pytest.mark.torch,
    pytest.mark.xdist_group("train_tutorials"),
    pytest.mark.skipif(not find_spec("torchvision"), reason="no torchvision"),
]
README = (FOLDER / "README.md").read_text(encoding="utf-8")
STAND_IN = launch.ROOT / "train" / "smddp"
RANKS = "torchrun --standalone --nproc-per-node=2"

MNIST = "python mnist.py --fake --lr 1"
MNIST_RANKS = f"{RANKS} mnist.py --fake --lr 1 --checkpoint mnist.pt"
MNIST_FILES = "python mnist.py"
MNIST_NODES = [
    f"torchrun --nnodes=2 --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-id=1 "
    "--rdzv-endpoint=127.0.0.1:29400"
    f" --local-addr=127.0.0.1 mnist.py --fake --lr 1 --checkpoint node{node}.pt --checkpoint-per-node"
    for node, ranks in enumerate((2, 1))
]
STL10 = "python stl10.py 0 0 $FAKE --decay-every 1"
STL10_RANKS = f"{RANKS} stl10.py $FAKE"
STL10_TCP, STL10_FILE, STL10_ENV = (
    [f"python stl10.py {rank} {rank} --world-size 2 --init-method {method} $FAKE" for rank in (0, 1)]
    for method in ("tcp://127.0.0.1:23456", "file:///tmp/stl10-ranks", "env://")
)
MASTER = "MASTER_ADDR=127.0.0.1 MASTER_PORT=23456"
TRAINER, TRAINER_SPAWN = "python trainer.py 4 2", "python trainer.py 4 2 --spawn 2"
TRAINER_RANKS = f"{RANKS} trainer.py 4 2"
MODEL_PARALLEL = "python model_parallel.py"
RESNET50_SPLIT = "python resnet50_halves.py --split-size 12 20"
RESNET50_SMALL = "--batch-size 14 --image-size 32 --steps 1"
HYBRID, HYBRID_RANKS = "python hybrid.py", f"{RANKS} hybrid.py"
FSDP, FSDP_RANKS = "python fsdp.py --save whole.pt", f"{RANKS} fsdp.py --save sharded.pt"
SAGEMAKER, SAGEMAKER_RANKS = "python sagemaker_ddp.py --fake", f"{RANKS} sagemaker_ddp.py --fake"
SAGEMAKER_LIBRARY = f"PYTHONPATH=../../train/smddp {RANKS} sagemaker_ddp.py --fake"

RUN_HERE = [
    *(MNIST, MNIST_RANKS, MNIST_FILES, *MNIST_NODES, STL10, STL10_RANKS),
    *(
        *STL10_TCP,
        TRAINER,
        TRAINER_SPAWN,
        TRAINER_RANKS,
        MODEL_PARALLEL,
        RESNET50_SPLIT,
        HYBRID,
        HYBRID_RANKS,
    ),
    *(FSDP, FSDP_RANKS, SAGEMAKER, SAGEMAKER_RANKS, SAGEMAKER_LIBRARY),
]
# Too slow without GPUs, fragments that other rows complete, or other rendezvous of torch (test_train_run.py).
NOT_RUN = {"python resnet50_halves.py --split-size 6 12 20 30 60", "python stl10.py 0 0 --workers 2"}
NOT_RUN |= {"python resnet50_halves.py", *STL10_FILE, *(f"{MASTER} {one}" for one in STL10_ENV)}
NOT_RUN |= {"torchrun --max-restarts=3", "python stl10.py RANK LOCAL_RANK", "python main.py RANK LOCAL_RANK"}


def commands() -> Iterator[str]:
    """Yield the commands of the README, from tables, text and code blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))
    for line in ["".join(blocks), *inline]:
        yield from filter(None, line.splitlines())


def program(command: str) -> str:
    """Return the first word that sets no variable."""
    return next((word for word in command.split() if "=" not in word), "")


def start(command: str, cwd: Path, *more: str, port: int = 0) -> launch.Run:
    """Start a command of the README, with the script of the repository and `cwd` as the current folder."""
    fake = re.search(r'^FAKE="(.*)"$', README, re.MULTILINE)
    assert fake
    command = command.replace("$FAKE", fake[1])
    command = re.sub(r"\b(23456|29400)\b", str(port), command)
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        variables[name] = value.replace("../../train/smddp", str(STAND_IN))
    words = [str(FOLDER / word) if (FOLDER / word).is_file() else word for word in (*words, *more)]
    if words[0] == "python":
        return launch.start(*words[1:], cwd=cwd, **variables)
    assert words[0] == "torchrun"
    here = [] if "--local-addr=127.0.0.1" in words else ["--local-addr=127.0.0.1"]
    return launch.start(launch.FORKED_TORCHRUN, *here, *words[1:], cwd=cwd, **variables)


def outputs(*runs: launch.Run) -> list[str]:
    return [run.stdout for run in launch.succeeded(list(runs))]


def numbers(text: str, pattern: str) -> list[float]:
    """Return what the group of `pattern` matches, in order."""
    return [float(number) for number in re.findall(pattern, text)]


def falls(losses: list[float]) -> bool:
    return len(losses) > 1 and losses == sorted(losses, reverse=True)


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def script(name: str) -> ModuleType:
    return launch.imported(FOLDER / f"{name}.py")


def test_mnist_learns_and_ranks_have_equal_weights(tmp_path: Path) -> None:
    """The checkpoint of two ranks fits a single process."""
    for ranks, output in enumerate(outputs(start(MNIST, tmp_path), start(MNIST_RANKS, tmp_path)), start=1):
        steps = 600 / 64 / ranks
        assert numbers(output, r"epoch \d: (\d+) steps") == [math.ceil(steps)] * 5
        losses = numbers(output, r"steps, loss (\S+),")
        assert losses[-1] < losses[0] / 10
        # Each image was tested once: 101 cannot be divided by two ranks.
        assert re.findall(r"accuracy (\S+) of (\d+) images", output)[-1] == ("1.0000", "101")
        hashes = re.findall(r"weights of each rank: (.*)", output)[0].split()
        assert len(hashes) == ranks
        assert len(set(hashes)) == 1
    net = script("mnist").Net()
    net.load_state_dict(read(tmp_path / "mnist.pt")["model_state_dict"])
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    assert hashes[0] == hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]
    assert sum(parameter.numel() for parameter in net.parameters()) == 225_226


def test_mnist_on_nodes_of_different_size_writes_a_checkpoint_on_each(tmp_path: Path) -> None:
    port = launch.free_port()
    output = "".join(outputs(*(start(command, tmp_path, "--epochs=1", port=port) for command in MNIST_NODES)))
    hashes = re.findall(r"weights of each rank: (.*)", output)[0].split()
    assert len(hashes) == 3
    assert len(set(hashes)) == 1
    first, second = (read(tmp_path / f"node{node}.pt")["model_state_dict"] for node in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_mnist_is_read_from_files(tmp_path: Path) -> None:
    dataset_files.write_mnist(tmp_path / "data", 100)
    (output,) = outputs(start(MNIST_FILES, tmp_path, "--epochs=3"))
    assert falls(numbers(output, r"steps, loss (\S+),"))
    assert "of 100 images" in output


@pytest.mark.parametrize("script", ["mnist.py", "sagemaker_ddp.py", "stl10.py 0 0"])
def test_missing_dataset_is_explained(tmp_path: Path, script: str) -> None:
    run = start(f"python {script}", tmp_path)
    assert run.wait() == 1
    assert "in data: add --download, or --fake for made-up images\n" in run.stderr
    assert "Traceback" not in run.stderr


METER = r"\d+\.\d{3} \(\d+\.\d{3}\)"
FIGURES = "\t".join(rf"{name} \d+\.\d{{4}} \(\d+\.\d{{4}}\)" for name in ("Loss", "Prec@1", "Prec@5"))


def test_stl10_prints_the_lines_of_the_document_however_ranks_meet(tmp_path: Path) -> None:
    port = launch.free_port()
    pair = [start(command, tmp_path, port=port) for command in STL10_TCP]
    alone, torchrun, tcp, second = outputs(start(STL10, tmp_path), start(STL10_RANKS, tmp_path), *pair)
    assert second == ""  # rank 0 prints the numbers of both
    train = re.findall(
        rf"^Epoch: \[[01]\]\[0/3\]\tTime {METER}\tData {METER}\t{FIGURES}$", alone, re.MULTILINE
    )
    assert len(train) == 2
    test = re.findall(rf"^Test: \[0/3\]\tTime {METER}\t{FIGURES}$", alone, re.MULTILINE)
    assert len(test) == 2
    assert falls(numbers("\n".join(train), r"Loss (\S+)"))
    assert numbers(alone, r"Begin Training Epoch \d \(lr (\S+)\)") == [0.01, 0.001]
    assert alone.count("Begin Validation @ Epoch") == 2
    assert "Initialize Model..." in alone

    for output in (alone, torchrun):
        accuracies = numbers(output, r"\* Prec@1 (\S+) Prec@5")
        for accuracy in accuracies:
            hits = accuracy * 65 / 100  # of 65 images, which two ranks cannot share equally
            assert abs(hits - round(hits)) < 0.001
        assert numbers(output, r"Epoch Accuracy: (\S+)") == accuracies
        assert numbers(output, r"Best Accuracy: (\S+)") == [accuracies[0], max(accuracies)]

    by_method = [re.sub(rf"(Time|Data) {METER}\t", "", output) for output in (torchrun, tcp)]
    assert len(set(by_method)) == 1
    assert "[0/2]" in by_method[0]  # half as many steps as in one process


def test_order_of_images_changes_every_epoch(tmp_path: Path) -> None:
    # With a learning rate of 0 only the composition of the batches can change what BatchNorm makes of them.
    still = ["--epochs=2", "--lr=0"]
    mnist, stl10 = outputs(start(MNIST, tmp_path, *still), start(STL10, tmp_path, *still))
    for losses in (numbers(mnist, r"steps, loss (\S+),"), numbers(stl10, r"Epoch: .*\tLoss (\S+)")):
        assert len(losses) == 2
        assert losses[0] != losses[1]


def test_model_parallel_learns_down_to_the_noise(tmp_path: Path) -> None:
    (output,) = outputs(start(MODEL_PARALLEL, tmp_path, "--save=weights.pt"))
    losses = numbers(output, r"epoch \d: loss (\S+)")
    assert len(losses) == 10
    assert losses[0] > 1
    assert 0.008 < losses[-1] < 0.012  # the variance of the noise is 0.01
    assert output.startswith("linear1 on cpu, linear2 on cpu\n")
    assert output.count("Training completed.") == 1
    weights = read(tmp_path / "weights.pt")
    inputs, targets = script("model_parallel").dataset(2048).tensors
    slope = torch.linalg.lstsq(inputs, targets).solution
    assert torch.allclose(weights["linear2.weight"] @ weights["linear1.weight"], slope.T, atol=0.02)


def test_trainer_learns_and_resumes_at_the_snapshot(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    # The same command with fewer epochs stands for a run that was killed after its first snapshot.
    first, output = outputs(start(TRAINER.replace(" 4 ", " 2 "), stopped), start(TRAINER, whole))
    (second,) = outputs(start(TRAINER, stopped))
    assert falls(numbers(output, r"Loss: (\S+)"))
    assert numbers(output, r"Epoch (\d) \| Training snapshot saved") == [1, 3]
    assert numbers(first, r"\] Epoch (\d)") == [0, 1]
    assert second.startswith("Resuming training from snapshot at Epoch 2\n")
    assert numbers(second, r"\] Epoch (\d)") == [2, 3]
    assert output.splitlines()[-2:] == second.splitlines()[-2:]  # the same losses
    ours, theirs = (read(path / "snapshot.pt") for path in (stopped, whole))
    assert ours["EPOCHS_RUN"] == theirs["EPOCHS_RUN"] == 4
    assert all(
        torch.equal(ours["MODEL_STATE"][name], theirs["MODEL_STATE"][name]) for name in ("weight", "bias")
    )
    momentum = [snapshot["OPTIMIZER_STATE"]["state"][0]["momentum_buffer"] for snapshot in (ours, theirs)]
    assert torch.equal(*momentum)


def test_trainer_gives_the_same_however_ranks_are_started(tmp_path: Path) -> None:
    folders = [tmp_path / "spawn", tmp_path / "torchrun"]
    for path in folders:
        path.mkdir()
    spawn, torchrun = outputs(start(TRAINER_SPAWN, folders[0]), start(TRAINER_RANKS, folders[1]))
    assert spawn == torchrun
    # 2048 samples, 32 per step of each of two processes.
    assert spawn.startswith("[rank 0 of 2] Epoch 0 | Batchsize: 32 | Steps: 32 | Loss: ")
    assert falls(numbers(spawn, r"Loss: (\S+)"))
    ours, theirs = (read(path / "snapshot.pt")["MODEL_STATE"] for path in folders)
    assert torch.equal(ours["weight"], theirs["weight"])


def test_resnet50_split_gives_the_same_outputs_and_both_times(tmp_path: Path) -> None:
    (output,) = outputs(start(RESNET50_SPLIT, tmp_path, *RESNET50_SMALL.split()))
    differences = numbers(output, r"largest difference (\S+)")
    assert len(differences) == 3  # from the whole model, and of each split size from no split
    assert max(differences) < 1e-4
    assert re.findall(r"split size (\d+): largest difference \S+ in (\d) parts", output) == [
        ("12", "2"),
        ("20", "1"),
    ]
    assert [seconds > 0 for seconds in numbers(output, r"(\d+\.\d{3}) s per step")] == [True] * 3


def test_resnet50_halves_equal_the_whole_model() -> None:
    # The import takes two seconds, and every process that runs tests reads this module.
    from torchvision.models import resnet50

    whole = resnet50(num_classes=10).double().eval()
    halves = script("resnet50_halves").TwoHalves(whole, torch.device("cpu"), torch.device("cpu"))
    images = torch.randn(3, 3, 32, 32, dtype=torch.double)
    gradients = []
    for scores in (whole(images), halves(images, split_size=2)):  # two ways through the same layers
        whole.zero_grad()
        scores.square().sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in whole.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-9 * float(gradients[0].abs().max()))


def test_hybrid_ranks_train_as_one_process(tmp_path: Path) -> None:
    alone, ranks = outputs(start(HYBRID, tmp_path), start(HYBRID_RANKS, tmp_path))
    expected, losses = (numbers(output, r"epoch \d: loss (\S+)") for output in (alone, ranks))
    assert falls(expected)
    assert losses == pytest.approx(expected, abs=1e-5)
    hashes = re.findall(r"weights of rank \d: (\w+) \(cpu, cpu\) after 640 samples", ranks)
    assert "after 1280 samples" in alone
    assert len(hashes) == 2
    assert len(set(hashes)) == 1


def test_fsdp_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    alone, ranks = outputs(start(FSDP, tmp_path), start(FSDP_RANKS, tmp_path))
    expected, losses = (numbers(output, r"epoch \d: loss (\S+)") for output in (alone, ranks))
    assert falls(expected)
    assert losses == pytest.approx(expected, abs=1e-5)
    whole, sharded = read(tmp_path / "whole.pt"), read(tmp_path / "sharded.pt")
    assert whole.keys() == sharded.keys()
    assert all(torch.allclose(whole[name], sharded[name], atol=1e-5) for name in whole)
    assert "has seen 1280 samples" in ranks
    share = re.findall(r"holds (\d+) of (\d+) parameters, (\d+) gradients, (\d+) optimizer values", ranks)[0]
    own, total, gradients, moments = map(int, share)
    assert total == sum(tensor.numel() for tensor in whole.values())
    assert total / 2 <= own < 0.51 * total
    assert gradients == own
    assert moments == 2 * own


def test_sagemaker_script_gives_the_same_with_and_without_the_library(tmp_path: Path) -> None:
    alone, without, with_it = outputs(
        start(SAGEMAKER, tmp_path),
        start(SAGEMAKER_RANKS, tmp_path, "--save=without.pt"),
        start(SAGEMAKER_LIBRARY, tmp_path, "--save=with.pt"),
    )
    assert alone.startswith("torch.distributed, rank 0 of 1, epoch 1")
    for output in (alone, without):
        assert falls(numbers(output, r"loss (\S+),"))
        assert numbers(output, r"accuracy (\S+)")[-1] == 1
    assert "epoch 1: 10 steps" in alone
    assert "epoch 1: 5 steps" in without
    assert without.startswith("torch.distributed, rank 0 of 2, epoch 1")
    assert without.endswith("\nlargest difference between weights of two ranks: 0.0\n")
    assert with_it == without.replace("torch.distributed", "smdistributed.dataparallel")
    ours, theirs = read(tmp_path / "with.pt"), read(tmp_path / "without.pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_commands_of_the_readme_are_those_that_run_here() -> None:
    shown = {command for command in commands() if program(command) in ("python", "torchrun")}
    ours = {command for command in shown if "-m train." not in command and "-m bench." not in command}
    assert ours - NOT_RUN == set(RUN_HERE)
    assert ours >= NOT_RUN
    assert RESNET50_SMALL in README


def test_other_commands_of_the_readme_are_accepted() -> None:
    from cloudddp.cli.main import main as cloudddp

    shown = [shlex.split(command) for command in commands()]
    trainer = [words[1:] for words in shown if words[0] == "RUN" and words != ["RUN"]]
    assert len(trainer) > 3
    for argv in trainer:
        cli.parse(argv)
    verbs = [words[1:] for words in shown if words[0] == "cloudddp"]
    assert len(verbs) > 5
    for words in verbs:
        with cloudddp.make_context("cloudddp", words) as context:
            name, verb, rest = cloudddp.resolve_command(context, words)
            assert verb is not None
            with verb.make_context(name, rest, parent=context):
                pass


def test_readme_names_every_document_script_and_tests() -> None:
    """tests/unit/test_collection.py shows that these exist."""
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert set(re.findall(r"^\| [^|]+ \| \[(\w+\.py)\]\(\1\) \|", README, re.MULTILINE)) == scripts
    table = README[: README.index("## STL-10")]
    headings = re.findall(r"^### (.*)", README, re.MULTILINE)
    assert len(headings) == 5
    for title in headings:
        assert f'"{title.split(" (")[0]}"' in table
    rows = re.findall(r"^\| .+ \| (.+) \|$", README[README.index("## What") :], re.MULTILINE)
    cells = [row for row in rows if row not in ("test", "---")]
    assert len(cells) > 40
    for cell in cells:
        assert re.search(r"`test_\w+`|not tested|not provided", cell), cell
