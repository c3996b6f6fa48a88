"""The report in Chromium: it looks as it should in light and dark, and loads nothing, whatever is in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from support.harness import cannot
from support.web import Handler, Server

from bench import report as example
from cloudddp.job.report import page

SMUGGLED = """<img src="{url}img"><script>document.title = "ran"</script><script src="{url}script"></script>
<link rel=stylesheet href="{url}css"><iframe src="{url}frame"></iframe><body onload="document.title='ran'">
<style>@import url({url}import); h1 {{ background: url({url}background) }}</style>
<object data="{url}object"></object>"""


@pytest.fixture
def requests() -> Iterator[tuple[str, list[str]]]:
    """A web server: its address, and the paths that it was asked for."""
    asked: list[str] = []

    class Asked(Handler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.answer(404)

    server = Server(Asked)
    yield f"http://{server.address}/", asked
    server.close()


def chromium(tmp_path: Path, file: Path, *options: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        cannot("Chromium is not installed (Debian: apt-get install chromium)")
    words = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [program, *words, profile, *options, file.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout


def test_page_in_light_and_dark(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    written = page.write(page.Evidence(example.JOB, example.fill(tmp_path), None, ()))
    assert written.stat().st_size < 3_000_000
    corners, colours = [], []
    for option in ("--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"):
        shot = tmp_path / "shot.png"
        chromium(tmp_path, written, option, "--window-size=1280,2000", f"--screenshot={shot}")
        pixels = image.imread(shot)[:, :, :3]
        corners.append(float(pixels[5, 5].mean()))
        is_blue = (pixels[:, :, 2] > 0.7) & (pixels[:, :, 0] < 0.4)
        colours.append(int(is_blue.sum()))
    assert corners[0] > 0.9 > 0.2 > corners[1]
    assert min(colours) > 1000


def test_smuggled_elements_load_and_run_nothing(tmp_path: Path, requests: tuple[str, list[str]]) -> None:
    """As if escaping had failed: the page's own policy stops them. Without it they would work."""
    url, asked = requests
    written = page.write(page.Evidence("job", tmp_path / "job", None, ()))
    text = written.read_text()
    assert text.startswith("<!doctype html>")
    written.write_text(text + SMUGGLED.format(url=url))
    dom = chromium(tmp_path, written, "--dump-dom", "--virtual-time-budget=3000")
    assert f"{url}img" in dom
    assert "<title>ran" not in dom
    assert asked == []
    written.write_text(text.replace("default-src", "other-src") + SMUGGLED.format(url=url))
    assert "<title>ran" in chromium(tmp_path, written, "--dump-dom", "--virtual-time-budget=3000")
    assert {"/img", "/script", "/frame", "/background", "/object"} <= set(asked)
