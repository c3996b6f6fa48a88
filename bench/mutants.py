"""Mutation check: changes one operator, number or condition at a time and runs the tests that should notice.

`make mutants` runs it, in an environment with cosmic-ray. It is not part of CI: one run takes hours. The
working tree is copied, so nothing in it changes. On Linux the tests run in a PID namespace: a mutant of the
code that ends processes must not end those of the developer, and what a mutant leaves behind ends with its
tests. Mutations that no test can notice are left out: type annotations (the modules import annotations from
__future__), the imports for them, and the flags of dataclasses, and `==` for `is`; so are those that are not
valid Python. Of the mutations at one place in the code, at most `--per-place` are tried.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv" / "bin" / "python"


@dataclass(frozen=True)
class Target:
    """A critical module, and the tests that cover it."""

    module: str
    tests: tuple[str, ...]


# These modules use `is` for None and for members of enumerations only, and both are equal only to themselves:
# with `==` the program stays the same.
EQUIVALENT = frozenset(("core/ReplaceComparisonOperator_Is_Eq", "core/ReplaceComparisonOperator_IsNot_NotEq"))
_FOLLOW = tuple(f"tests/unit/test_follow_{part}.py" for part in ("decide", "state", "verdict"))
TARGETS = (
    Target(
        "cloudddp/cluster/plan.py",
        tuple(f"tests/unit/test_{name}.py" for name in ("plan", "costs", "golden_requests")),
    ),
    Target("cloudddp/job/follow/decide.py", _FOLLOW),
    Target("cloudddp/job/follow/verdict.py", _FOLLOW),
    Target("cloudddp/job/outcome.py", ("tests/unit/test_outcome.py", *_FOLLOW)),
    Target(
        "cloudddp/job/failure_text.py",
        ("tests/unit/test_outcome.py", "tests/unit/test_failure_advice.py", *_FOLLOW),
    ),
    Target(
        "cloudddp/cluster/teardown.py",
        ("tests/unit/test_leftovers.py", "tests/cli/test_teardown_files.py", "tests/cli/test_teardown.py"),
    ),
    Target(
        "infra/node/agent/node/processes.py",
        ("tests/node/test_agent_processes.py", "tests/node/test_kill.py"),
    ),
    Target(
        "infra/node/agent/gang/step.py", ("tests/unit/test_gang_step.py", "tests/unit/test_gang_stops.py")
    ),
    Target("cloudddp/job/results/receive.py", ("tests/unit/test_receive.py",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="modules whose path contains TEXT")
    parser.add_argument("--per-place", type=int, default=2, metavar="N")
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="at most N mutants a module, evenly spread"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "copy"
        copy_tree(copy)
        for target in TARGETS:
            if options.only in target.module:
                check(target, copy, options.per_place, options.limit)
    return 0


def copy_tree(copy: Path) -> None:
    """Copy the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, path, follow_symlinks=False)


def check(target: Target, copy: Path, per_place: int, limit: int) -> None:
    """Try the mutants of one module and print the score and the mutants that survived."""
    from cosmic_ray.mutating import mutate_and_test

    os.chdir(copy)
    # First in sys.path of every process that the tests start, before the installed checkout.
    os.environ["PYTHONPATH"] = str(copy)
    # Emptied by every run. Those that pytest names by itself would be kept for days where a run is killed.
    temporary = copy.parent / "t"
    pytest = [str(PYTHON), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--basetemp={temporary}"]
    command = [*isolated(), *pytest, *target.tests]
    began = time.monotonic()
    passed = subprocess.run(command, capture_output=True, text=True)
    if passed.returncode:
        sys.exit(
            f"the tests of {target.module} fail without a mutation:\n{passed.stdout[-3000:]}{passed.stderr}"
        )
    took = time.monotonic() - began
    # A test that takes longer than all of them did hangs.
    limited = shlex.join([*command, f"--timeout={10 + took:.0f}"])
    mutations = list(chosen(target.module, per_place))
    if limit and len(mutations) > limit:
        mutations = [mutations[index * len(mutations) // limit] for index in range(limit)]
    killed = 0
    print(f"{target.module}: {len(mutations)} mutants, {took:.0f} s or less each", flush=True)
    for number, mutation in enumerate(mutations, 1):
        result = mutate_and_test([mutation], limited, 30 + 2 * took)
        if result.is_killed:
            killed += 1
            continue
        diff = (result.diff or result.output or "").splitlines()
        changed = [line for line in diff if line[:1] in "+-@" and line[:3] not in ("---", "+++")]
        # As soon as it is known: a run takes hours, and may be ended before its time.
        print("\n".join([f"  survivor, mutant {number}:", *(f"    {line}" for line in changed)]), flush=True)
    print(f"{target.module}: {killed} of {len(mutations)} mutants killed", flush=True)


def isolated() -> list[str]:
    """Return what to put before a command so that it sees no process but its own. Empty where there is no
    Linux.

    The shell is process 1: it collects orphans, and the tests have an ordinary pid.
    """
    if sys.platform != "linux":
        return []
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    return ["unshare", *user, "--pid", "--fork", "--mount-proc", "--kill-child", *shell]


def chosen(module: str, per_place: int) -> Iterator[Any]:
    """Yield the mutations of a module that a test could notice."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    code = Path(module).read_text()
    ignored = list(unnoticeable(ast.parse(code)))
    seen: Counter[tuple[int, int]] = Counter()
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/work.sqlite", WorkDB.Mode.create) as work:
        init([Path(module)], work, {})
        for item in work.work_items:
            (mutation,) = item.mutations
            if mutation.operator_name in EQUIVALENT:
                continue
            start = mutation.start_pos
            seen[start] += 1
            if seen[start] > per_place or any(first <= start < last for first, last in ignored):
                continue
            if is_python(mutation, code):
                yield mutation
            else:
                seen[start] = per_place  # no operator: the `*` before keyword-only parameters


def is_python(mutation: Any, code: str) -> bool:
    """Return whether the mutated code compiles."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    try:
        with warnings.catch_warnings(action="ignore"):  # `is` with a literal
            compile(mutate_code(code, operator, mutation.occurrence), mutation.module_path, "exec")
    except SyntaxError:
        return False
    return True


def unnoticeable(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the ranges of annotations, decorators and `TYPE_CHECKING`, as ((line, column), (line,
    column))."""
    for node in ast.walk(tree):
        found: list[Any] = list(getattr(node, "decorator_list", []))
        found += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        found += [node] if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING" else []
        for part in found:
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


if __name__ == "__main__":
    sys.exit(main())
