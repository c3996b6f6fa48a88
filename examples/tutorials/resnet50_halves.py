"""ResNet-50 in two halves on two devices, as a whole batch and split so that both devices work at the same
time.

    python resnet50_halves.py --split-size 20
    python resnet50_halves.py --split-size 6 12 20 30 60        # which size is best?

With fewer than two GPUs both halves are on the CPU: the results are the same, but nothing can be faster.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet50


class TwoHalves(nn.Module):
    def __init__(self, whole: Any, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        stem = (whole.conv1, whole.bn1, whole.relu, whole.maxpool)
        self.half1 = nn.Sequential(*stem, whole.layer1, whole.layer2).to(first)
        self.half2 = nn.Sequential(whole.layer3, whole.layer4, whole.avgpool, nn.Flatten(), whole.fc).to(
            second
        )

    def forward(self, images: Tensor, split_size: int = 0) -> Tensor:
        """Return the scores, on the second device. 0: the batch is not split, and one device waits for the
        other."""
        parts = iter(images.to(self.first).split(split_size or len(images)))
        between = self.half1(next(parts)).to(self.second)
        scores = []
        for part in parts:
            # Python only queues work on GPUs. The second GPU runs this ...
            scores.append(self.half2(between))
            # ... while the first already runs this.
            between = self.half1(part).to(self.second)
        scores.append(self.half2(between))
        return torch.cat(scores)


def synchronize(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def seconds_per_step(model: TwoHalves, images: Tensor, split_size: int, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    labels = torch.arange(len(images), device=model.second)
    model.train()
    started = 0.0
    for step in range(-1, steps):
        if step == 0:  # the step before was a warm-up
            synchronize(model.first, model.second)
            started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images, split_size), labels).backward()
        optimizer.step()
    synchronize(model.first, model.second)
    return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="ResNet-50 in two halves.")
    parser.add_argument(
        "--split-size", type=int, nargs="*", default=[], help="images per part; several are compared"
    )
    parser.add_argument("--batch-size", type=int, default=120)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    options = parser.parse_args()

    first = second = torch.device("cpu")
    if torch.cuda.device_count() >= 2:
        first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    torch.manual_seed(0)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    whole = resnet50(weights=None).eval()
    with torch.no_grad():
        expected = whole(images[:8])
        model = TwoHalves(whole, first, second).eval()
        print(f"halves on {first} and {second}, {options.batch_size} images of {options.image_size} pixels")
        scores = model(images)
        print(f"whole model: largest difference {(scores[:8].cpu() - expected).abs().max().item():.1e}")
        # In evaluation mode. In training BatchNorm normalizes each part by itself, so that splitting changes
        # results.
        for size in options.split_size:
            difference = (model(images, size) - scores).abs().max().item()
            print(
                f"split size {size}: largest difference {difference:.1e} in {-(-len(images) // size)} parts"
            )

    unsplit = seconds_per_step(model, images, 0, options.steps)
    print(f"no split: {unsplit:.3f} s per step")
    for size in options.split_size:
        seconds = seconds_per_step(model, images, size, options.steps)
        print(f"split size {size}: {seconds:.3f} s per step ({unsplit / seconds - 1:+.0%} speed)")


if __name__ == "__main__":
    main()
