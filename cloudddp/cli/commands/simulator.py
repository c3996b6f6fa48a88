"""The verbs on the simulator: `cloudddp sim start`, `stop` and so on."""

from __future__ import annotations

from functools import partial

import click

from cloudddp.cli.commands.options import JSON, Finite, flag
from cloudddp.cli.lazy_commands import LazyGroup, Option, Verb, listed

# Of what AWS schedules for an instance.
_CODES = ("instance-reboot", "system-reboot", "system-maintenance", "instance-retirement", "instance-stop")

_Own = partial(Verb, only_own_options=True)  # no cluster is chosen


def _seconds(name: str, text: str) -> click.Option:
    return Option(f"--{name}-seconds", "S", text, Finite(0, 600))


start = _Own(
    "simulator:start",
    params=[
        Option(
            "--port", "PORT", "Port of the endpoint (0: any free one).", click.IntRange(0, 65535), default=0
        ),
        Option(
            "--nodes",
            None,
            "Nodes as separate hosts (namespace), as such hosts with systemd and cloud-init (machine; "
            "root only), or as processes of this computer; auto: namespace if possible.",
            click.Choice(["auto", "namespace", "machine", "process"]),
            default="auto",
        ),
        Option(
            "--interface interfaces",
            "NAME",
            "Name of the nodes' network interface (default: ens5). If repeated, the nodes take the "
            "names in turn.",
            multiple=True,
        ),
        Option(
            "--policy",
            "FILE",
            "IAM policy (JSON) of the user that this simulator's key belongs to, instead of full access.",
            click.Path(dir_okay=False),
        ),
        Option(
            "--scp",
            "FILE",
            "Service control policy (JSON) of the account's organization; it limits every user.",
            click.Path(dir_okay=False),
        ),
        _seconds("pending", "Minimum time in state pending."),
        _seconds("booting", "Time from state running until SSH answers."),
        _seconds("shutting-down", "Minimum time in state shutting-down."),
        _seconds("unknown", "Time for which a new instance is reported as InvalidInstanceID.NotFound."),
    ],
    help="""Start the simulator, unless it is running with these options.

    All times are 0 by default.

    \b
    Example:
      cloudddp sim start --booting-seconds 20
    """,
)

stop = _Own(
    "simulator:stop",
    help="""Stop the simulator and every process of its nodes.

    Also cleans up after a simulator that has crashed.

    \b
    Example:
      cloudddp sim stop
    """,
)

status = _Own(
    "simulator:status",
    params=[JSON],
    help="""Show the simulator and its nodes.

    \b
    Example:
      cloudddp sim status
    """,
)

env = _Own(
    "simulator:env",
    help="""Print the variables that point AWS clients at the simulator.

    They are enough for API calls. If nodes are separate hosts (namespaces), their addresses exist only inside
    the simulator's network: use `cloudddp sim shell` or `cloudddp sim exec` for SSH to them.

    \b
    Example:
      eval "$(cloudddp sim env)"
    """,
)

shell = _Own(
    "simulator:shell",
    help="""Open a shell inside the simulator's network.

    Every AWS client in it uses the simulator. Nodes that are separate hosts (namespaces) can only be reached
    from there; the other networks of this computer and the internet cannot be reached. Process nodes have no
    network of their own, so with them the shell stays in this computer's network.

    \b
    Example:
      cloudddp sim shell
    """,
)

exec_ = _Own(
    "simulator:exec_",
    passes_arguments=True,
    context_settings={"ignore_unknown_options": True},
    params=[click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED)],
    help="""Run COMMAND inside the simulator's network.

    As in `cloudddp sim shell`, every AWS client uses the simulator.

    \b
    Example:
      cloudddp sim exec -- aws ec2 describe-instances
    """,
)

session = _Own(
    "simulator:session",
    params=[
        Option("--target", "ID", "Instance id of the node.", required=True),
        Option(
            "--port", "PORT", "Port of the node.", click.IntRange(1, 65535), default=22, show_default=True
        ),
    ],
    help="""Connect to a port of a node, as Session Manager does.

    Stdin and stdout are the connection. It needs no route to the node and no rule of a security group. It
    replaces `aws ssm start-session --document-name AWS-StartSSHSession` as a proxy command of ssh, or as
    `proxy_command` in cloudddp.toml.

    \b
    Example:
      cloudddp --sim up \\
        --proxy-command 'cloudddp sim session --target %h --port %p'
    """,
)

fault = Verb(
    "simulator:fault",
    params=[click.Argument(["kind"]), click.Argument(["nodes"], nargs=-1, required=True)],
    help="""Inject a fault into a node or its network.

    NODE is a rank (in the cluster of -c, of cloudddp.toml, or the only one), an instance id or the start of
    one, or an address. `cloudddp sim status` shows the nodes and their faults.

    \b
      kill NODE          the machine fails without warning
      cut NODE           the node loses its network
      cut-between A B    two nodes cannot reach each other
      cut-from A B       packets of B do not reach A; those of A reach B
      freeze NODE        every process is stopped
      fill-disk NODE     no disk space is left
      slow-ssh NODE      SSH is slow
      drop-ssh NODE      SSH packets are lost
      heal NODE          ends all of these except kill

    \b
    Example:
      cloudddp sim fault freeze 1 -c demo
    """,
)

interrupt = Verb(
    "simulator:interrupt",
    params=[
        click.Argument(["node"]),
        Option("--seconds", "S", "Length of the notice.", Finite(0, 600), default=120.0, show_default=True),
    ],
    help="""Interrupt a spot node, after EC2's notice.

    NODE is named as in `cloudddp sim fault`.

    \b
    Example:
      cloudddp sim interrupt 1 --seconds 30
    """,
)

maintenance = Verb(
    "simulator:maintenance",
    params=[
        click.Argument(["node"]),
        Option(
            "--code",
            "KIND",
            f"What will happen: {', '.join(_CODES)}.",
            click.Choice(_CODES),
            default="instance-reboot",
            show_default=True,
        ),
        Option("--seconds", "S", "Time until it begins.", Finite(0, 600), default=600.0, show_default=True),
    ],
    help="""Schedule maintenance of a node, as AWS does.

    NODE is named as in `cloudddp sim fault`. The metadata and DescribeInstanceStatus announce it.

    \b
    Example:
      cloudddp sim maintenance 1 --code system-reboot
    """,
)

conditions = _Own(
    "simulator:conditions",
    params=[click.Argument(["changes"], required=False), flag("--clear", "Reset all conditions.")],
    help="""Change EC2 and network conditions: capacity, latency.

    CHANGES are JSON; without them, the current conditions are shown. docs/simulator.md lists them.

    \b
    Example:
      cloudddp sim conditions '{"quota": {"on-demand-g": 8}}'
    """,
)

sim = LazyGroup(
    "sim",
    listed(conditions, env, exec_, fault, interrupt, maintenance, session, shell, start, status, stop),
    help="""\
Simulate EC2 on this computer, without an AWS account.

Any AWS client can use the simulator.

\b
  cloudddp --sim up                starts it automatically
  eval "$(cloudddp sim env)"       points this shell's AWS clients at it
""",
)
