"""What the agent reports about its machine."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.agentnode import FOREVER, Node
from support.programs import first_on_path, program

from agent.node import machine


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("127.77.0.4", "lo"), ("192.0.2.1", ""), ("255.255.255.255", "")],
)
def test_interface_is_the_one_with_the_address(address: str, name: str) -> None:
    assert machine.interface_of(address) == name


class NvidiaSMI:
    """A program of that name on PATH that runs a shell script and counts its calls with -L. The threads that
    tests of watch/gpus.py leave behind in this process call it with other arguments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch

    def does(self, script: str) -> None:
        text = f"[ $1 = -L ] || exit 1\necho 'GPU 0: simulated' >> {self._folder}/calls\n{script}"
        first_on_path(self._monkeypatch, self._folder / "bin" / "nvidia-smi", text)

    @property
    def calls(self) -> int:
        return len((self._folder / "calls").read_text().splitlines())


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaSMI:
    return NvidiaSMI(tmp_path, monkeypatch)


@pytest.mark.parametrize(("expected", "seen", "calls"), [(1, 1, 1), (2, 2, 2)])
def test_probe_waits_for_the_gpus_of_the_type(
    node: Node, tmp_path: Path, nvidia_smi: NvidiaSMI, expected: int, seen: int, calls: int
) -> None:
    """The driver lists one more at each call."""
    nvidia_smi.does(f"cat {tmp_path}/calls")
    assert node.probe(gpus=expected, gpu_seconds=60.0).gpus == seen
    assert nvidia_smi.calls == calls


def test_gpus_that_are_left_are_counted(node: Node, nvidia_smi: NvidiaSMI) -> None:
    """nvidia-smi(1): exit code 15, a GPU has fallen off the bus."""
    nvidia_smi.does("echo 'GPU 0: x'; echo 'Unable to determine the device handle for GPU 0000'; exit 15")
    assert node.probe().gpus == 1
    before = nvidia_smi.calls
    assert node.probe(gpus=2, gpu_seconds=0.5).gpus == 1
    assert nvidia_smi.calls >= before + 2


def test_probe_reports_what_a_job_needs(node: Node) -> None:
    found = node.probe()
    assert found.interface == "lo"
    assert found.cpus == len(os.sched_getaffinity(0))
    assert 1024 <= found.free_port < 32_768  # no connection gets such a port as its own
    assert os.access(found.python, os.X_OK)
    assert found.running == ()
    assert node.probe(python=sys.executable).python == sys.executable
    assert node.probe(python="no-such-python").python == ""
    assert stat.S_IMODE(node.store.stat().st_mode) == 0o700
    node.start(FOREVER)
    assert node.probe().running == (node.id(),)


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Return a Python that imports a stand-in for torch with this code."""

    def build(torch: str | None, distributed: str = "") -> str:
        packages = tmp_path / "packages"
        (packages / "torch/distributed").mkdir(parents=True)
        if torch is not None:
            (packages / "torch/__init__.py").write_text(torch)
            (packages / "torch/distributed/run.py").write_text(distributed)
        return str(program(tmp_path / "python", f'PYTHONPATH={packages} exec {sys.executable} -S "$@"'))

    return build


TORCH = """\
class cuda:
    def device_count(): return 4
    def synchronize(device): pass
def zeros(*_, device):
    if int(device[5:]) in {broken}: raise RuntimeError("CUDA error: Error 802: system not yet initialized")
"""


def test_each_gpu_is_used_with_torch_on_request(node: Node, python: Callable[..., str]) -> None:
    """NVML, and so nvidia-smi and device_count(), list the GPUs of a machine whose fabric manager is down."""
    own = python(TORCH.replace("{broken}", "(1, 3)"))
    found = node.probe(python=own, torch_seconds=60.0)
    error = "GPU 1: CUDA error: Error 802: system not yet initialized"
    assert (found.torch_gpus, found.torch_error) == (2, error)
    found = node.probe(python=own)
    assert (found.torch_gpus, found.torch_error) == (None, "")


@pytest.mark.parametrize(("seconds", "usable"), [(60.0, 4), (0.0, 3)])
def test_gpus_are_used_again_while_the_fabric_manager_starts(
    node: Node, python: Callable[..., str], tmp_path: Path, seconds: float, usable: int
) -> None:
    begin = f"import os\nBROKEN = () if os.path.exists('{tmp_path}/x') else (2,)\nopen('{tmp_path}/x', 'w')\n"
    own = python(begin + TORCH.replace("{broken}", "BROKEN"))
    found = node.probe(python=own, torch_seconds=60.0, gpu_seconds=seconds)
    assert found.torch_gpus == usable


def test_python_without_torch_has_no_torch_gpus(node: Node) -> None:
    lean = program(node.home / "python", f'exec {sys.executable} -IS "$@"')
    found = node.probe(python=str(lean), torch_seconds=60.0)
    assert (found.torch_gpus, found.torch_error) == (None, "")


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        ("raise ImportError('libcudart.so: cannot')", "exited with 1: ImportError: libcudart.so: cannot"),
        ("import os; print('[]', flush=True); os._exit(0)", "exited with 0: no output"),
    ],
)
def test_torch_that_cannot_be_imported_has_no_gpus(
    node: Node, python: Callable[..., str], torch: str, why: str
) -> None:
    found = node.probe(python=python(torch), torch_seconds=60.0)
    assert (found.torch_gpus, why in found.torch_error) == (0, True)


def test_gpus_are_not_used_while_a_job_runs(node: Node, python: Callable[..., str]) -> None:
    """It may have allocated all of their memory, so that the check would fail: `up` can be repeated at any
    time."""
    node.start(FOREVER)
    node.rank_pid()
    found = node.probe(python=python("raise RuntimeError('out of memory')"), torch_seconds=60.0)
    assert (found.running, found.torch_gpus, found.torch_error) == ((node.id(),), None, "")


RDM = "provider: efa\n    fabric: {fabric}\n    domain: {device}-rdm\n    type: FI_EP_RDM\n"


@pytest.mark.parametrize(
    ("output", "status", "count"),
    [
        ("".join(RDM.format(fabric="efa", device=f"rdmap{n}s27") for n in (16, 32)), 0, 2),
        # libfabric 2 lists a second fabric for each device
        ("".join(RDM.format(fabric=one, device="rdmap16s27") for one in ("efa", "efa-direct")), 0, 1),
        ("fi_getinfo: -61 (No data available)", 61, 0),
        ("domain:\ndomain", 0, 0),
    ],
)
def test_probe_counts_efa_devices(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, status: int, count: int
) -> None:
    """Each device has several endpoints; fi_info exits with 61 (ENODATA) where there is none."""
    text = f"cat <<'END'\n{output}\nEND\nexit {status}"
    first_on_path(monkeypatch, tmp_path / "bin" / "fi_info", text)
    assert (node.probe(efa=4).efa, node.probe(efa=0).efa) == (count, 0)


def test_efa_devices_without_libfabric_are_those_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/sys/class/infiniband also lists devices of other drivers, such as mlx5_core."""
    for device, driver in (("rdmap16s27", "efa"), ("rdmap32s27", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "infiniband" / device / "device").mkdir(parents=True)
        (tmp_path / "infiniband" / device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    (tmp_path / "infiniband" / "broken").mkdir()
    monkeypatch.setattr(machine, "INFINIBAND", str(tmp_path / "infiniband"))
    monkeypatch.setattr(machine, "EFA_FI_INFO", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.count_efa() == 2
