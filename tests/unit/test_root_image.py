"""The operating system of machine nodes is made once, completely or not at all. Here by programs that take
the place of debootstrap and chroot: tests/witness has the real ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import ROOT, cannot, until
from support.namespaces import as_root
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
NOBODY = 65534


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
    assert made.parent == site.home / "sim" / "roots"
    assert (made / "etc/made").read_text() == "made\n"
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
    assert site.left == [made.name]
    assert site.calls == 2


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


def test_full_disk_is_named_before_anything_is_made(site: Site) -> None:
    code = (
        "from pathlib import Path\nfrom cloudddp.simulator.hosts.machines import root_image\n"
        f"try: root_image.ensure(Path({str(site.home)!r}), print)\n"
        "except Exception as error: print(error, '|', error.hint)"
    )
    roots = site.folder / "small"
    roots.mkdir()
    mount = f'mount -t tmpfs -o size=16m tmpfs {roots} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", code],
        env={**os.environ, root_image.VARIABLE: str(roots)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{roots} has 16 MiB free, and 2048 MiB are needed" in done.stdout
    assert root_image.VARIABLE in done.stdout
    assert site.calls == 0


def test_missing_programs_are_named_with_their_packages(tmp_path: Path) -> None:
    code = "from cloudddp.simulator.hosts.machines import root_image; print(root_image.unavailable_reason())"
    argv = [*as_root(), "env", f"PATH={tmp_path}", sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "apt-get install systemd-container" in done.stdout


def test_an_ordinary_user_is_told_that_it_needs_root() -> None:
    if os.getuid() == 0:
        assert "they need root" in as_user(NOBODY, root_image.unavailable_reason)
    else:
        assert "they need root" in root_image.unavailable_reason()


def running(word: str) -> list[str]:
    """Return the processes with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if word.encode() in path.read_bytes() else []
    return found


def as_user(user: int, ask: Callable[[], str]) -> str:
    """Return what a function returns in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(user, user, user)
            os.write(writer, ask().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
