"""Options of cloudddp after the script: those that cost money or results are refused, all others belong to
the script."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from support.commands import verb as command_of

from cloudddp.cli.main import main
from cloudddp.cli.misplaced_options import REFUSED
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import UsageError

FOR_THE_SCRIPT = (
    "--config=x",
    "-c",
    "--env",
    "-e",
    "--env-file",
    "-m",
    "--nodes",
    "--tag",
    "--profile",
    "--user",
)


def spellings() -> Iterator[tuple[str, str, click.Option]]:
    """Yield every verb, spelling and option of `launch` and `run` that is refused after the script."""
    for verb in ("launch", "run"):
        for option in command_of(verb).params:
            if isinstance(option, click.Option):
                for name in (*option.opts, *option.secondary_opts):
                    if name in REFUSED:
                        yield verb, name, option


EVERY = list(spellings())


def refusal(*words: str) -> UsageError:
    with pytest.raises(UsageError) as refused:
        main.main(list(words), standalone_mode=False, prog_name="cloudddp")
    return refused.value


def forms(name: str, option: click.Option) -> Iterator[tuple[str, ...]]:
    yield (name,) if option.is_flag else (name, "4")
    if not option.is_flag:
        yield (f"{name}=4",) if name.startswith("--") else (f"{name}4",)


@pytest.mark.parametrize(("verb", "name", "option"), EVERY, ids=[f"{v} {n}" for v, n, _ in EVERY])
def test_option_after_the_script_is_refused(verb: str, name: str, option: click.Option) -> None:
    for form in forms(name, option):
        error = refusal(verb, "train.py", "--lr", "0.1", *form)
        assert error.message.startswith(f"{name} comes after the script"), form
        assert "put it before train.py" in error.hint
        assert f"`cloudddp {verb} -- train.py --lr 0.1 {' '.join(form)}`" in error.hint


def test_every_refused_option_exists() -> None:
    assert {name for _, name, _ in EVERY} == REFUSED


@pytest.mark.parametrize("verb", ["launch", "run"])
@pytest.mark.parametrize("name", FOR_THE_SCRIPT)
def test_other_options_belong_to_the_script(verb: str, name: str) -> None:
    context = command_of(verb).make_context(verb, ["t.py", name, "4"], parent=click.Context(main))
    assert context.params["args"] == (name, "4")
    assert not context.params.get("config")


@pytest.mark.parametrize(
    ("words", "owners"),
    [(("run", "t.py", "--dry-run"), "launch and up"), (("launch", "t.py", "--max-cost=5"), "run and up")],
)
def test_option_of_another_verb_is_refused(words: tuple[str, ...], owners: str) -> None:
    error = refusal(*words)
    assert owners in error.message
    assert f"cloudddp {words[0]} -- t.py {words[2]}" in error.hint


def test_combined_short_flags_are_refused() -> None:
    assert refusal("run", "train.py", "-yn4").message.startswith("-n comes after the script")


def test_hint_repeats_options_before_the_script() -> None:
    error = refusal("run", "-n", "2", "--spot", "-eA=b c", "--sim", "t.py", "--max-cost", "5")
    assert "cloudddp run -n 2 --spot --env 'A=****' -- t.py --max-cost 5" in error.hint


def test_hint_keeps_global_options_that_the_script_has_too() -> None:
    command = "cloudddp launch -- a.py -c cfg.yaml --region x".split()
    shown = GlobalOptions(cluster="default", region="us-west-2").command_line(command)
    assert shown == "cloudddp -c default --region us-west-2 launch -- a.py -c cfg.yaml --region x"
    assert GlobalOptions(region="us-west-2").command_line(["cloudddp", "ls"]) == "cloudddp ls"  # lists all


@pytest.mark.parametrize("value", ["-c", "--config", "-e"])
def test_double_dash_as_a_value_does_not_end_options(value: str) -> None:
    assert "--max-cost comes after" in refusal("run", value, "--", "train.py", "--max-cost", "5").message
