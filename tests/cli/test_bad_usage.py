"""Command lines that cannot be meant: one sentence and exit code 2, before AWS is asked for anything."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from cloudddp.cli.main import main
from cloudddp.errors import UsageError

CR = "cr-0123456789abcdef0"
KEY = "arn:aws:kms:{}:123456789012:alias/train"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("up --region us-esat-1", "'us-east-1'"),
        ("up -t p99.huge", "unknown instance type 'p99.huge'"),
        ("up -t g5.xlarge,g5.hugelarge", "unknown instance type 'g5.hugelarge'"),
        ("up --gpu H1000", "no instance type has a GPU H1000"),
        ("up -t g5.xlarge --gpu A10G", "--instance-type and --gpu exclude each other"),
        ("up --spot --spot prefer", "--spot and --spot=prefer exclude each other"),
        ("up -t g5.xlarge,g6.xlarge --price 1", "cluster.price is that of one type, and there are 2"),
        (f"up --spot prefer --reservation {CR}", "spot instances cannot use"),
        (f"doctor --spot --reservation {CR}", "spot instances cannot use"),
        ("doctor --trial -n 2", "leave out -n and -c"),
        ("doctor --trial -c mine", "leave out -n and -c"),
        ("doctor --trial --json", "leave out --json"),
        ("-c 'a;rm -rf /' up", "cluster.name"),
        ("run nowhere.py", "script not found: nowhere.py"),
        ("run -d -n 1 --discard ok.py", "-d excludes --discard"),
        ("run -d -n 1 --keep-on-failure 5 ok.py", "-d excludes --discard and --keep-on-failure"),
        ("run -n 2 -t g5.12xlarge --nodes-min 3 ok.py", "job.nodes_min is 3"),
        ("launch -d --down --keep nan ok.py", "nan"),
        ("launch -d --down --keep -1 ok.py", "-1"),
        ("launch -d --down --keep long ok.py", "'long' is not a valid float"),
        ("launch -d --keep 5 ok.py", "--keep needs --down, or job.on_stall"),
        ("launch --down ok.py", "--down needs -d"),
        ("launch --save-minutes 16 ok.py", "save_minutes"),
        ("launch --stall-minutes 0.2 ok.py", "is below job.heartbeat = 15 s"),
        ("launch --on-stall restart ok.py", "needs job.retries"),
        ("capacity -t p5.48xlarge --regions us-east-9", "unknown AWS region 'us-east-9'"),
        ("capacity --gpu H1000", "no instance type has a GPU H1000"),
        ("capacity -t p5.49xlarge", "unknown instance type 'p5.49xlarge'"),
        ("capacity -t p5.48xlarge --days 15", "Invalid value for '--days'"),
        ("pull runs runs/../../x", "not a path inside the project"),
        ("--region us-east-1 up --regions us-east-1,us-west-2", "--region and --regions exclude each other"),
        (f"up --kms-key {KEY.format('eu-west-1')}", "in eu-west-1, and the cluster would be in us-east-1"),
        (
            f"up --regions us-east-1,us-west-2 --kms-key {KEY.format('us-east-1')}",
            "in us-east-1, and the cluster would be in us-west-2",
        ),
        ("run ok.py --max-cost 5", "put it before ok.py"),
        ("launch --epochs 3 ok.py", "go after it: `cloudddp launch ok.py --epochs`"),
        ("launch --detatch ok.py", "did you mean --detach?"),
        ("up -t p4d.24xlarge --no-efa --require-efa", "EFA"),
        ("init new --example exac", "available: classic, exact, trainer; for a folder of that name:"),
        ("up --tag aws:team=x", "begins with 'aws:', which is reserved"),
        ("up --tag AWS:Team=x", "begins with 'aws:', which is reserved"),
        ("up --tag cloudddp:owner=me", "begins with 'cloudddp:', which is reserved"),
        ("up --tag Cloudddp:Cluster=x", "begins with 'cloudddp:', which is reserved"),
        ("up --tag Team", "--tag 'Team' has no '='"),
        ("up --tag =x", "tag key '' is not allowed"),
        (f"up --tag {'k' * 128}=x", "1 to 127 characters"),
        (f"up --tag k={'v' * 257}", "the value of tag 'k' is not allowed"),
        ("up --tag 'k=a\nb'", "the value of tag 'k' is not allowed"),
        ("up --tag 'a\tb=x'", "without control characters"),
        ("launch -m", "-m needs the name of a module"),
        ("launch -e NOT_SET_HERE ok.py", "--env NOT_SET_HERE: this variable is not set here"),
        ("launch -e RAW=\udcff ok.py", "--env: job.env: the value of RAW is not UTF-8"),
        ("launch --env-file bad ok.py", "--env-file bad, line 2: no '='"),
        ("extend", "give one new deadline"),
        ("extend --hours 1 --max-cost 9", "give one new deadline"),
        ("extend --hours nan", "not in the range"),
        ("extend --until yesterday", "is not a time"),
        ("logs --rank a", "--rank 'a' is not a list of numbers"),
        ("logs --rank 5-3", "is not a list of numbers"),
        ("logs --rank 0-999999999", "is not a list of numbers"),
        ("logs --node 1,", "is not a list of numbers"),
        ("logs --since 5", "--since '5' is not a time"),
        (f"logs --since {'9' * 5000}d", "is not a time"),
        ("logs --tail -1", "is not a number of lines"),
        (f"logs --tail {'9' * 5000}", "is not a number of lines"),
        ("logs --grep '('", "is not a regular expression"),
        ("logs --raw --json", "exclude each other"),
        ("logs -f --tail 3 --grep x", "with -f, --tail and --grep exclude each other"),
        ("forward -- 1:0", "not a port"),
        ("forward 65536", "not a port"),
        ("forward 1:2:3", "not a port"),
        ("forward \uff11", "not a port"),
        ("sim start --interface=a/b", "1 to 15 letters"),
        ("sim start --nodes process --interface e0", "no interface of their own"),
        ("sim start --pending-seconds=nan", "--pending-seconds"),
        ("sim start --unknown-seconds=601", "--unknown-seconds"),
        ("sim interrupt 0 --seconds=-inf", "--seconds"),
    ],
)
def test_bad_usage_exits_2_before_any_call(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    """In this process. A call would be another error: nobody listens at the endpoint."""
    (project / "ok.py").write_text("")
    (project / "bad").write_text("A=1\nhunter2\n")
    monkeypatch.chdir(project)
    settings = {
        "ENDPOINT_URL": "http://127.0.0.1:1",
        "REGION": "us-east-1",
        "ACCESS_KEY_ID": "x",
        "SECRET_ACCESS_KEY": "x",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLOUDDDP_YES", "1")
    with pytest.raises((UsageError, click.UsageError)) as refused:
        main.main(shlex.split(words), standalone_mode=False, prog_name="cloudddp")
    error = refused.value
    shown = (
        error.format_message() if isinstance(error, click.ClickException) else f"{error.message} {error.hint}"
    )
    assert message in shown
    assert "hunter2" not in shown
