"""Whether PyTorch can use the machine's GPUs. The first import of torch also reads it from a cold disk."""

from __future__ import annotations

import json
import os
import time
from typing import Optional

from agent.node.commands import outcome

# Stand-ins for GPUs (the simulator's) answer only in a process with this variable: for jobs there is no GPU.
GPU_CHECK_VARIABLE = "CLOUDDDP_GPU_CHECK"
MAX_ERROR = 500  # characters
_STARTING = "system not yet initialized"  # cudaErrorSystemNotReady, 802
_PAUSE = 2.0  # seconds

# `nvidia-smi -L` and device_count(), which asks NVML, list the GPUs of a machine whose fabric manager is
# down; the first use of one fails there ("Error 802: system not yet initialized"). So each GPU is used.
# torchrun is imported as well.
_CHECK = """\
import json
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    print(json.dumps(None))
    raise SystemExit
import torch.distributed.run
usable, problem = 0, ""
for device in range(torch.cuda.device_count()):
    try:
        torch.zeros(1, device="cuda:%d" % device)
        torch.cuda.synchronize(device)
        usable += 1
    except RuntimeError as error:
        problem = problem or "GPU %d: %s" % (device, error)
print(json.dumps([usable, problem]))
"""


def usable_gpus(python: str, seconds: float, wait: float) -> tuple[Optional[int], str]:
    """Return how many GPUs PyTorch can use, and why not more; None for a Python without torch.

    If the check fails or takes longer than `seconds`, the number is 0. It is repeated for up to `wait`
    seconds while the fabric manager starts.
    """
    until = time.monotonic() + wait
    found = _check(python, seconds)
    while _STARTING in found[1] and time.monotonic() < until:
        time.sleep(_PAUSE)
        found = _check(python, seconds)
    return found


def _check(python: str, seconds: float) -> tuple[Optional[int], str]:
    env = {**os.environ, GPU_CHECK_VARIABLE: "1"}
    code, out, errors = outcome([python, "-c", _CHECK], seconds, env=env)
    if code is None:
        return 0, f"importing torch: {errors}"
    try:
        found = json.loads(out.splitlines()[-1])
        return (None, "") if found is None else (int(found[0]), str(found[1])[:MAX_ERROR])
    except (ValueError, TypeError, LookupError):
        last = (errors.strip().splitlines() or ["no output"])[-1]
        return 0, f"{python} exited with {code}: {last}"[:MAX_ERROR]
