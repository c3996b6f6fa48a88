"""Random command lines, environments and configuration files, each made from a seed. Runs nothing.

python tests/support/fuzz_cases.py SEED    show a case
"""

from __future__ import annotations

import json
import random
import string
import sys
from dataclasses import asdict, dataclass
from typing import Any

TEXTS = [
    "",
    " ",
    "-",
    "--",
    "---",
    "-1",
    "--help",
    "0",
    "1",
    "2",
    "00",
    "+1",
    "1e9",
    "1e400",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1" * 20,
    "9" * 5000,
    "0x10",
    "1_000",
    "½",
    "²",
    "٣",
    "\n",
    "a\nb",
    "\t",
    "\r",
    "\x01",
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x7f",
    "\x9b31m",
    "\udcff\udcfe",
    "a\udc80",
    "ü",
    "日本",
    "e\u0301",
    "\u202egnp.exe",
    "\u200b",
    "\ufeff",
    "😀",
    "a" * 300,
    "b" * 70000,
    "'",
    '"',
    "'\"'\"'",
    "$(id)",
    "`id`",
    "; id",
    "| id",
    "&& id",
    "*",
    "~",
    "~nobody-here/x",
    "%s",
    "%n%n",
    "{}",
    "{0}",
    ".",
    "..",
    "../..",
    "../../x",
    "a/b",
    "a//b",
    "./a",
    "train.py",
    "train.py:0",
    "main",
    "-m",
    "@file",
    "@",
    "\\",
    "\\n",
    "=",
    "A=",
    "=A",
    "A=B",
    "A=B=C",
    "1A=B",
    "A\n=B",
    "RANK=1",
    "A=\udcff",
    "2x8",
    "gpu",
    "1,1",
    "4,2",
    ",",
    ",,",
    "1,",
    "true",
    "false",
    "yes",
    "null",
    "c10d",
    "g5.xlarge",
    "G5.XLARGE",
    "g5.xlarge ",
    "p4d.24xlarge",
    "t2.micro",
    "us-east-1",
    "us-east-1a",
    "US-EAST-1",
    "eu-nowhere-9",
    "ami-0",
    "/aws/service/x",
    "0.0.0.0/0",
    "1.2.3.4/33",
    "::/0",
    "203.0.113.7/32",
    "i-0",
    "node",
    "default",
    "a" * 64,
    '{"throttle": 1}',
    "{",
    "[]",
    '{"a": ' * 3000,
    "1" + "0" * 400,
    "2026-01-01",
    "subnet-0",
    "vpc-0",
]
PATHS = [
    "missing",
    "missing/deep",
    "folder",
    "folder/",
    "file",
    "file/x",
    "unreadable",
    "link",
    "loop",
    "dangling",
    "fifo",
    "null",
    "cloudddp.toml",
    "odd.toml",
    "deep/" * 30,
    "n" * 300,
    "\udcff",
    "new\nline",
    "/dev/null",
    "/dev/null/x",
    "/dev/full",
    "/dev/zero",
    "/proc/self/mem",
    "/nowhere/at/all",
]
PLAIN = [
    "up -y",
    "up -y -n 2 -t g5.xlarge --max-hours 1",
    "up -y --spot --max-cost 5",
    "up",
    "down -y",
    "down",
    "status",
    "status --json",
    "ls",
    "ls --json",
    "launch train.py",
    "launch -d train.py --lr 1",
    "launch -m main",
    "run -y train.py",
    "run -y -n 2 -m main a b",
    "jobs",
    "jobs --json",
    "logs",
    "logs -f",
    "logs --rank 0",
    "cancel",
    "sync",
    "pull",
    "pull runs",
    "pull --to out",
    "exec -- id",
    "exec id",
    "ssh",
    "ssh 0 id",
    "init",
    "init new",
    "init --example new",
    "init --example trainer new",
    "allow-me",
    "sim status",
    "sim stop",
    "sim env",
    "sim fault kill 0",
    "sim interrupt 0",
    "sim conditions",
    "--version",
    "--help",
    "up --help",
    "sim --help",
]
VARIABLES = {
    "HOME": ["", "missing", "file", "\udcff", "/nowhere"],
    "LANG": ["C", "", "nonsense", "tr_TR.UTF-8"],
    "LC_ALL": ["C", "POSIX", "x" * 300],
    "TERM": ["", "dumb", "xterm-256color", "\x1b"],
    "COLUMNS": ["0", "-1", "1", "x", "9" * 40, "\udcff"],
    "TMPDIR": ["missing", "file", ""],
    "USER": ["", "\udcff", "a\nb", "x" * 400],
    "AWS_REGION": ["", "us-east-1\n", "\udcff", "nowhere", "x" * 300, "../.."],
    "AWS_DEFAULT_REGION": ["", "us-east-1", "ü"],
    "AWS_PROFILE": ["", "missing", "\n", "\udcff"],
    "AWS_CONFIG_FILE": ["missing", "folder", "odd.toml", "loop"],
    "AWS_SHARED_CREDENTIALS_FILE": ["missing", "folder", "odd.toml", "loop"],
    "AWS_ACCESS_KEY_ID": ["", "\udcff", "a\nb", "ü", "x" * 5000],
    "AWS_SECRET_ACCESS_KEY": ["", "\udcff", "ü"],
    "AWS_ENDPOINT_URL": [
        "",
        "nonsense",
        "http://",
        "file:///etc/passwd",
        "http://127.0.0.1:99999",
        "\udcff",
        "http://[::1",
    ],
    "AWS_CA_BUNDLE": ["missing", "folder", "file"],
    "AWS_DATA_PATH": ["missing", "file", "\udcff"],
    "AWS_RETRY_MODE": ["", "nonsense"],
    "AWS_MAX_ATTEMPTS": ["", "0", "-1", "x"],
    "CLOUDDDP_CHECKIP_URL": ["", "nonsense", "file:///etc/passwd", "http://127.0.0.1:1/\n"],
    "CLOUDDDP_CONFIG": PATHS,
    "CLOUDDDP_PROFILE": ["", "missing"],
    "CLOUDDDP_YES": ["", "1", "maybe", "\udcff"],
    "CLOUDDDP_SIM_NODES": ["", "nonsense"],
    "CLOUDDDP_CLUSTR": ["x"],
    "CLOUDDDP_": ["x"],
    "CLOUDDDP_\udcff": ["x"],
    "CLOUDDDP_\n": ["x"],
    "NO_COLOR": ["1"],
    "FORCE_COLOR": ["1"],
    "PAGER": ["", "missing"],
    "COMP_WORDS": ["cloudddp "],
}
STATES = [
    "",
    "state",
    "file",
    "file/x",
    "loop",
    "dangling",
    "folder",
    "fifo",
    "null",
    "\udcff",
    "new\nline",
    "n" * 300,
]


@dataclass
class Case:
    """A case made from a seed. Strings stand for bytes, as in os.fsdecode."""

    seed: int
    words: list[str]
    variables: dict[str, str | None]
    toml: bytes | None
    toml_is: str
    stdin: bytes = b""
    cwd: str = ""
    git: str = ""


def generate(seed: int) -> Case:
    chance = random.Random(seed)
    mild = seed % 5 > 1  # at most one strange part, so that the case gets past the first check
    strange = chance.randrange(4) if mild else -1
    words = _line(chance, _commands()) if strange in (0, -1) else _plain_line(chance)
    variables: dict[str, str | None] = {
        name: chance.choice(values)
        for name, values in VARIABLES.items()
        if chance.random() < {-1: 0.03, 1: 0.05}.get(strange, 0.0)
    }
    for section, key in _settings():
        if chance.random() < {-1: 0.02, 1: 0.04}.get(strange, 0.0):
            name = (
                f"CLOUDDDP_{section}_{key}".upper()
                if section in ("sync", "setup")
                else f"CLOUDDDP_{key}".upper()
            )
            variables[name] = chance.choice(TEXTS)
    if chance.random() < {-1: 0.1, 1: 0.3}.get(strange, 0.0):
        variables["CLOUDDDP_HOME"] = chance.choice(STATES)
    if chance.random() < 0.05:
        variables["HOME"] = None
    plain = b"[cluster]\nregion = 'us-east-1'\n\n[job]\noutputs = ['runs']\n"
    kind = (
        "file"
        if strange not in (-1, 2)
        else chance.choices(
            ["file", "none", "folder", "loop", "dangling", "fifo", "null", "unreadable"],
            [12, 6, 1, 1, 1, 1, 1, 1],
        )[0]
    )
    return Case(
        seed=seed,
        words=[word.replace("\0", "") for word in words],
        variables=variables,
        toml=None if kind != "file" else _toml(chance) if strange in (-1, 2) else plain,
        toml_is=kind,
        stdin=chance.choice([b"", b"y\n", b"n\n", b"\xff\n", b"\0" * 100]),
        cwd=chance.choices(["", "folder", "gone"], [20, 3, 1])[0] if strange in (-1, 3) else "",
        git=chance.choices(["", "folder", "file", "loop"], [5, 3, 1, 1])[0] if strange in (-1, 3) else "",
    )


# -- the line ------------------------------------------------------------------------------------------------


def _commands() -> dict[str, Any]:
    """Return every command by its words ('sim start')."""
    from support.commands import commands

    found = {path.removeprefix("cloudddp "): command for path, command in commands() if path != "cloudddp"}
    # Excluded: they run any program, or start a process that must be ended.
    return {
        name: command for name, command in found.items() if name not in ("sim start", "sim shell", "sim exec")
    }


def _settings() -> list[tuple[str, str]]:
    from cloudddp.config.schema import SECTIONS, fields

    return [(section, key) for section in SECTIONS for key in fields(section)]


def _line(chance: random.Random, commands: dict[str, Any]) -> list[str]:
    from cloudddp.cli.main import main

    words = _options(chance, main, 0.15)
    if chance.random() < 0.04:
        return [*words, _text(chance)]
    name = chance.choice(sorted(commands))
    words += name.split()
    words += _options(chance, commands[name], 0.25)
    if (
        "--dry-run" in [option for one in commands[name].params for option in one.opts]
        and chance.random() < 0.2
    ):
        words.append("--dry-run")
    words += [_text(chance) for _ in range(chance.choices([0, 1, 2, 5], [6, 4, 2, 1])[0])]
    if chance.random() < 0.1:
        chance.shuffle(words)
    return words


def _plain_line(chance: random.Random) -> list[str]:
    """Return a plausible command line."""
    words = chance.choice(PLAIN).split()
    if words[0] in ("up", "run", "launch", "down") and chance.random() < 0.3:
        words.insert(1, "--dry-run")
    if chance.random() < 0.3:
        words.insert(1, chance.choice(["-v", "--cluster=x", "--region=eu-west-1", "--profile=missing"]))
    command = _commands().get(words[0])
    options = [
        one
        for one in getattr(command, "params", [])
        if one.opts[0].startswith("-") and "--sim" not in one.opts
    ]
    if options and chance.random() < 0.4:
        one = chance.choice(options)
        words[1:1] = [one.opts[-1]] if getattr(one, "is_flag", False) else [one.opts[-1], _text(chance)]
    return words


def _options(chance: random.Random, command: Any, often: float) -> list[str]:
    words: list[str] = []
    for one in command.params:
        if not one.opts[0].startswith("-") or "--sim" in one.opts or chance.random() > often:
            continue
        option = chance.choice(one.opts)
        if getattr(one, "is_flag", False):
            words.append(option if chance.random() < 0.9 else f"{option}={_text(chance)}")
        elif chance.random() < 0.7:
            words += [option, _text(chance)]
        else:
            words.append(f"{option}={_text(chance)}" if chance.random() < 0.7 else option)
    return words


def _text(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.6:
        return chance.choice(TEXTS)
    if kind < 0.85:
        return chance.choice(PATHS)
    letters = string.printable + "\x00\x1b\x85ü\udcff\u2028😀"
    return "".join(chance.choices(letters, k=chance.randint(1, 12)))


# -- the file ------------------------------------------------------------------------------------------------


def _toml(chance: random.Random) -> bytes:
    lines: list[str] = []
    sections: dict[str, list[str]] = {}
    for section, key in _settings():
        sections.setdefault(section, []).append(key)
    for section in chance.sample(sorted(sections), chance.randint(0, len(sections))):
        lines.append(
            chance.choices(
                [f"[{section}]", f"[[{section}]]", f"[{section}.x]", f"[{section}"], [20, 1, 1, 1]
            )[0]
        )
        keys = chance.sample(sections[section], chance.randint(0, min(2, len(sections[section]))))
        lines += [f"{key} = {_value(chance, 0)}" for key in keys]
        if chance.random() < 0.1:
            lines.append(
                f"{chance.choice(['nodez', 'ü', '', 'a.b.c', chr(34) + 'x' + chr(34)])} = {_value(chance, 0)}"
            )
    if chance.random() < 0.1:
        lines.insert(0, f"{chance.choice(['cluster', 'job', 'nodes', 'x'])} = {_value(chance, 0)}")
    raw = chance.choice(["\n", "\n", "\r\n"]).join(lines).encode("utf-8", "surrogateescape")
    harm = chance.random()
    if harm < 0.04:
        return b"\xef\xbb\xbf" + raw
    if harm < 0.08:
        return raw + b"\0"
    if harm < 0.12:
        return raw.decode(errors="replace").encode("utf-16")
    if harm < 0.25 and raw:
        spoiled = bytearray(raw)
        for _ in range(chance.randint(1, 5)):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        return bytes(spoiled)
    return raw


def _value(chance: random.Random, depth: int) -> str:
    values = [
        "1",
        "0",
        "-1",
        "4",
        "0x7f",
        "9" * 400,
        "9" * 5000,
        "0x" + "f" * 9000,
        "1.5",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "true",
        "false",
        '""',
        '"x"',
        '"gpu"',
        '"c10d"',
        '"us-east-1"',
        '"g5.xlarge"',
        '"\\u001b[31m"',
        '"\\u0000"',
        '"\\u202e"',
        '"\\ud800"',
        '"\\U0010ffff"',
        "'''\n\n'''",
        '"' + "a" * 70000 + '"',
        "2026-01-01",
        "2026-01-01T00:00:00Z",
        "12:00:00",
        "9999-99-99",
        "[]",
        "{}",
        '["a", 1]',
        '["a\\nb", ""]',
        "{ A = 'B' }",
        "{ A = 1 }",
        "{ '' = '' }",
        "{ RANK = '1' }",
        "[" * 3000,
        "[" * 60 + "]" * 60,
        "{ a = " * 60 + "1" + "}" * 60,
        "\udcff",
        "unquoted",
    ]
    if depth < 3 and chance.random() < 0.2:
        inner = ", ".join(_value(chance, depth + 1) for _ in range(chance.randint(0, 3)))
        return f"[{inner}]"
    return chance.choice(values)


if __name__ == "__main__":
    print(json.dumps(asdict(generate(int(sys.argv[1]))), indent=1, default=repr))
