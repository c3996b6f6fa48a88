"""The trainer, where torchvision "downloads" MNIST by copying it from SOURCE. It takes long enough that
another rank could start, too."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import torchvision

from train.main import main
from train.process_exit import exit_process


def download(dataset: torchvision.datasets.MNIST) -> None:
    print(f"rank {os.environ['RANK']} downloads", flush=True)
    time.sleep(0.3)
    if not Path(dataset.raw_folder).exists():
        shutil.copytree(Path(os.environ["SOURCE"], "MNIST"), Path(dataset.root, "MNIST"))


if __name__ == "__main__":
    torchvision.datasets.MNIST.download = download
    exit_process(main(sys.argv[1:]))
