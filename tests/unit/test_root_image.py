"""The operating system of machine nodes is made once, completely or not at all. Here by programs that take
the place of debootstrap and chroot: tests/witness has the real ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.harness import cannot, until
from support.programs import program

from cloudddp.errors import CloudDDPError
from cloudddp.simulator.hosts.machines import root_image

# `debootstrap ... trixie TARGET`: counts its calls, waits while `hold` exists, fails if `fail` does.
DEBOOTSTRAP = """\
#!/bin/sh
for word; do target=$word; done
mkdir -p $target/etc
echo call >> {folder}/calls
while [ -e {folder}/hold ]; do sleep 0.05; done
if [ -e {folder}/fail ]; then echo "E: Couldn't download packages: systemd"; exit 1; fi
echo made > $target/etc/made
echo ID=debian > $target/etc/os-release
"""


class Site:
    """A folder for root file systems, and the programs that make them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        for name, text in (("debootstrap", DEBOOTSTRAP.format(folder=folder)), ("chroot", "#!/bin/sh\n")):
            program(folder / "bin" / name, text)
        self.reports: list[str] = []

    def ensure(self) -> Path:
        return root_image.ensure(self.home, self.reports.append)

    @property
    def calls(self) -> int:
        path = self.folder / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in root_image.folder(self.home).glob("debian-*") if path.is_dir())

    def process(self) -> subprocess.Popen[str]:
        """`ensure` in a process of its own."""
        code = (
            "import sys; from pathlib import Path; from cloudddp.simulator.hosts.machines import root_image; "
            f"root_image.ensure(Path({str(self.home)!r}), lambda text: print(text, flush=True))"
        )
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    if os.getuid():
        cannot("only root makes it")
    found = Site(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(root_image.VARIABLE, raising=False)
    return found


def test_it_is_made_once_and_below_the_simulators_state(site: Site) -> None:
    made = site.ensure()
    assert (made.parent, (made / "etc/made").read_text()) == (site.home / "sim" / "roots", "made\n")
    assert (site.ensure(), site.calls) == (made, 1)
    assert len(site.reports) == 1


def test_what_an_interruption_has_left_is_made_again(site: Site) -> None:
    (site.folder / "hold").touch()
    process = site.process()
    until(lambda: site.calls == 1)
    process.kill()
    process.communicate()
    (unfinished,) = site.left
    assert unfinished.endswith(".new")
    until(lambda: not running(unfinished))  # debootstrap ends with it
    (site.folder / "hold").unlink()
    made = site.ensure()
    assert (site.left, site.calls) == ([made.name], 2)


def test_one_that_lost_its_files_is_made_again(site: Site) -> None:
    made = site.ensure()
    (made / "etc/os-release").unlink()
    assert site.ensure() == made
    assert (site.calls, root_image.is_complete(made)) == (2, True)


def test_failure_is_reported_with_the_programs_words_and_leaves_nothing(site: Site) -> None:
    (site.folder / "fail").touch()
    with pytest.raises(CloudDDPError, match="debootstrap failed with:\n  E: Couldn't download packages"):
        site.ensure()
    assert site.left == []
    (site.folder / "fail").unlink()
    assert site.ensure().is_dir()


def test_two_simulators_that_share_the_folder_make_it_once(site: Site) -> None:
    (site.folder / "hold").touch()
    first = site.process()
    until(lambda: site.calls == 1)
    second = site.process()
    assert second.stdout is not None
    assert "another simulator is making" in second.stdout.readline()
    (site.folder / "hold").unlink()
    assert [process.wait(30) for process in (first, second)] == [0, 0]
    for process in (first, second):
        process.communicate()
    assert (site.calls, len(site.left)) == (1, 1)


def test_full_disk_is_named_before_anything_is_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=16 << 20))
    with pytest.raises(CloudDDPError, match="has 16 MiB free, and 2048 MiB are needed") as caught:
        site.ensure()
    assert root_image.VARIABLE in str(caught.value.hint)
    assert (site.calls, site.left) == (0, [])


@pytest.mark.parametrize(
    ("user", "why"), [(0, "apt-get install systemd-container"), (1000, "they need root")]
)
def test_what_machine_nodes_lack_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, why: str
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why in root_image.unavailable_reason()


def running(word: str) -> list[str]:
    """Return the processes with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if word.encode() in path.read_bytes() else []
    return found
