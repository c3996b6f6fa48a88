"""What runs the tests: their collection, their processes, and the documents that name them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import simulators, tiers
from support.harness import ROOT, TIMEOUT, clean_environment, wait_for
from support.processes import Process

from bench import mutants

WITH_TORCH = {"train", "examples"}  # its subject is torch


def test_collection_imports_torch_only_for_tests_of_torch() -> None:
    folders = (one for one in sorted(tiers.TESTS.iterdir()) if one.name not in WITH_TORCH)
    code = (
        "import sys, pytest\n"
        "assert pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', *sys.argv[1:]]) == 0\n"
        "print('imported:', sorted({'torch', 'torchvision', 'sklearn', 'tensorboard'} & sys.modules.keys()))"
    )
    words = [sys.executable, "-c", code, *(str(one) for one in folders if [*one.rglob("test_*.py")])]
    out = subprocess.check_output(words, cwd=ROOT, env=clean_environment(), text=True)
    assert out.endswith("imported: []\n"), out[-2000:]


def test_entry_of_the_slow_tests_that_names_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"nowhere": "", "unit/test_ranks.py::test_none": ""}
    assert tiers.missing(["unit", "unit/test_ranks.py", *gone]) == list(gone)
    monkeypatch.setattr(tiers, "SLOW", gone)
    with pytest.raises(pytest.UsageError, match=r"does not exist: nowhere, unit/test_ranks\.py::test_none"):
        tiers.mark_slow_tests([])


def test_run_of_the_rest_has_the_slow_tests_and_those_that_were_skipped(tmp_path: Path) -> None:
    skipped = "tests/unit/test_collection.py::test_entry_of_the_slow_tests_that_names_nothing_is_an_error"
    (tmp_path / "skips").write_text(f"{skipped}\n")
    collect = "-m pytest --collect-only -q -p no:cacheprovider tests/unit/test_collection.py"
    env = clean_environment(TEST_SKIPPED=str(tmp_path / "skips"))
    done = subprocess.run(
        [sys.executable, *collect.split()], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    slow = "tests/unit/test_collection.py::test_collection_imports_torch_only_for_tests_of_torch"
    assert {line for line in done.stdout.splitlines() if "::" in line} == {slow, skipped}


@pytest.mark.parametrize("code", [0, 2, -9])
def test_exit_code_of_a_process_that_ended_before_its_pid_was_read(code: int) -> None:
    (out, out_end), (err, err_end), (answer, answer_end) = (os.pipe() for _ in range(3))
    os.write(out_end, b"written\n")
    os.write(answer_end, b"123\n%d 2048\n" % code)
    for end in (out_end, err_end, answer_end):
        os.close(end)
    process = Process(["python"], out, err, answer)
    assert process.pid == 123
    assert process.communicate(timeout=10) == ("written\n", "")
    assert (process.returncode, process.poll()) == (code, code)
    assert process.peak_memory == 2 << 20


def test_simulators_end_with_the_test_process(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from support import simulators\nfrom cloudddp.simulator import control\n"
        "base = Path(sys.argv[1])\n"
        "watcher = simulators.stop_after_this_process(base)\n"
        f"control.start(base / 'home', nodes='process', timeout={TIMEOUT})\n"
        "print('started', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=clean_environment(PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), str(ROOT)])),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    assert simulators.running(tmp_path) == [tmp_path / "home"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not simulators.running(tmp_path), "the simulator has ended")


def test_names_of_tests_in_documents_exist() -> None:
    sources = list((ROOT / "tests").rglob("test_*.py"))
    existing = {path.stem for path in sources}
    for path in sources:
        existing.update(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {
        (document.name, name)
        for document in documents
        for name in re.findall(r"`(test_\w+)`", document.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {one for one in named if one[1] not in existing} == set()


def test_modules_and_tests_of_the_mutation_check_exist() -> None:
    named = {name for target in mutants.TARGETS for name in (target.module, *target.tests)}
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_each_behaviour_of_the_trainer_names_its_test() -> None:
    listed = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in listed if line.startswith("| ") and not line.startswith("| behaviour")]
    assert rows
    assert [row for row in rows if "`test_" not in row and "not tested" not in row] == []
