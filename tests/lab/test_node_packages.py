"""Which packages of this computer a simulated node has: not those that only this computer can have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cloudddp.simulator.hosts import python_environment

SHOW = """
import importlib.metadata, importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))
print(*sorted(one.name for one in importlib.metadata.distributions()))
"""


def install(packages: Path, name: str, file: str, text: str = "", origin: object = None) -> None:
    """Write what pip or conda does. `origin`: the content of direct_url.json (PEP 610)."""
    files = {file: text, f"{name}-1.dist-info/METADATA": f"Name: {name}\nVersion: 1\n"}
    if origin:
        files[f"{name}-1.dist-info/direct_url.json"] = json.dumps(origin)
    files[f"{name}-1.dist-info/INSTALLER"] = "conda\n" if name == "conda" else "pip\n"
    files[f"{name}-1.dist-info/RECORD"] = f'"../../../bin/{name}",,\n"{file}",,\n'
    for path, content in files.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(content)


def test_packages_from_folders_of_this_computer_are_not_on_a_node(tmp_path: Path) -> None:
    """Neither for `import` nor for pip, which otherwise would not install them. conda's packages name the
    folder of their build; the image has torch. A node may not see the folder."""
    source, computer, venv = tmp_path / "my source", tmp_path / "computer", tmp_path / "venv"
    packages = computer / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for folder in (source / "editable", source / "torch", computer / "bin"):
        folder.mkdir(parents=True)
    here = {"url": source.as_uri(), "dir_info": {"editable": True}}
    install(packages, "indexed", "indexed/__init__.py")
    install(packages, "conda", "conda.py", "", {"url": "file:///croot/a", "dir_info": {}})
    install(packages, "damaged", "damaged.py", "", {"url": 3})
    install(packages, "editable", "__editable__.pth", str(source), here)
    install(packages, "copied", "copied/__init__.py", "", {"url": "file:///not/here", "dir_info": {}})
    install(packages, "shared", "namespace/a.py", "", here)
    python_environment.create(venv, venv, prefix=computer, base_prefix=Path(sys.base_prefix))

    def seen() -> list[str]:
        names = "indexed conda damaged editable copied namespace torch later".split()
        done = subprocess.run([venv / "bin/python", "-c", SHOW, *names], capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    assert seen() == ["indexed conda damaged namespace", "conda damaged indexed"]
    install(packages, "torch", "torch.pth", str(source), here)
    install(packages, "later", "later.py")
    modules, distributions = seen()
    assert modules.endswith("torch later")
    assert distributions == "conda damaged indexed later torch"
