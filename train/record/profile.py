"""--profile: a Chrome trace of some steps from each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from train.config import Config, profiled_steps
from train.hooks import Hook, Run


class Profiler(Hook):
    """Records the steps that --profile names and writes OUT/trace-rankN.json; open it at ui.perfetto.dev, or
    with chrome://tracing."""

    def __init__(self, config: Config) -> None:
        self.steps = profiled_steps(config)
        self._profile: Any = None

    def before_step(self, run: Run) -> None:
        if run.step + 1 == self.steps.start:
            activities = [ProfilerActivity.CPU]
            if run.comm.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.__enter__()

    def after_step(self, run: Run) -> None:
        if self._profile is None or (run.step + 1 < self.steps.stop and run.step < run.total_steps):
            return
        if run.comm.device.type == "cuda":
            torch.cuda.synchronize(run.comm.device)
        self.close()
        self._trace.export_chrome_trace(str(run.config.folder / f"trace-rank{run.comm.rank}.json"))

    def close(self) -> None:
        if self._profile is not None:
            self._trace, self._profile = self._profile, None
            self._trace.__exit__(None, None, None)
