"""The simulator is independent: it works without any other module of cloudddp but errors and payload."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Blocks every other module of cloudddp, imports each module of the simulator and prints their number.
IMPORT_ALL = """
import importlib, pkgutil, sys

ALLOWED = ("cloudddp", "cloudddp.errors", "cloudddp.files", "cloudddp.simulator")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cloudddp" and name not in ALLOWED and not name.startswith("cloudddp.simulator."):
            raise ImportError(f"the simulator imports {name}")

sys.meta_path.insert(0, Blocker())
import cloudddp.simulator
names = [module.name for module in pkgutil.walk_packages(cloudddp.simulator.__path__, "cloudddp.simulator.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""  # noqa: E501


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_simulator_imports_nothing_of_the_product() -> None:
    done = run(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    files = list((ROOT / "cloudddp" / "simulator").rglob("*.py"))
    assert int(done.stdout) == len(files) - 1  # all but cloudddp/simulator/__init__.py


def test_blocker_reports_other_modules() -> None:
    """So that the test above can fail."""
    done = run(IMPORT_ALL.replace("import cloudddp.simulator\n", "import cloudddp.tags\n", 1))
    assert "the simulator imports cloudddp.tags" in done.stderr
