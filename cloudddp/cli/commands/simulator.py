"""The verbs on the simulator: `cloudddp sim
start|stop|status|env|shell|exec|session|fault|interrupt|maintenance|conditions`."""

from __future__ import annotations

import click

from cloudddp.cli.commands.options import JSON, Finite
from cloudddp.cli.lazy_commands import LazyGroup, Verb

_HERE = "cloudddp.cli.commands.simulator"
VERBS = {
    "conditions": (
        f"{_HERE}:conditions",
        "Change EC2 and network conditions: capacity, latency.",
    ),
    "env": (f"{_HERE}:env", "Print the variables that point AWS clients at the simulator."),
    "exec": (f"{_HERE}:exec_", "Run COMMAND inside the simulator's network."),
    "fault": (f"{_HERE}:fault", "Inject a fault into a node or its network."),
    "interrupt": (f"{_HERE}:interrupt", "Interrupt a spot node, after EC2's notice."),
    "maintenance": (f"{_HERE}:maintenance", "Schedule maintenance of a node, as AWS does."),
    "session": (
        f"{_HERE}:session",
        "Connect to a port of a node, as Session Manager does.",
    ),
    "shell": (f"{_HERE}:shell", "Open a shell inside the simulator's network."),
    "start": (f"{_HERE}:start", "Start the simulator, unless it is running with these options."),
    "status": (f"{_HERE}:status", "Show the simulator and its nodes."),
    "stop": (f"{_HERE}:stop", "Stop the simulator and every process of its nodes."),
}

sim = LazyGroup(
    "sim",
    VERBS,
    help="""\
Simulate EC2 on this computer, without an AWS account.

Any AWS client can use the simulator.

\b
  cloudddp --sim up                starts it automatically
  eval "$(cloudddp sim env)"       points this shell's AWS clients at it
""",
)


def _seconds(name: str, help_text: str) -> click.Option:
    return click.Option([f"--{name}-seconds"], type=Finite(0, 600), metavar="S", help=help_text)


start = Verb(
    "start",
    "cloudddp.cli.actions.simulator:start",
    only_own_options=True,
    params=[
        click.Option(
            ["--port"],
            type=click.IntRange(0, 65535),
            default=0,
            metavar="PORT",
            help="Port of the endpoint (0: any free one).",
        ),
        click.Option(
            ["--nodes"],
            type=click.Choice(["auto", "namespace", "machine", "process"]),
            default="auto",
            help="Nodes as separate hosts (namespace), as such hosts with systemd and cloud-init (machine; "
            "root only), or as processes of this computer; auto: namespace if possible.",
        ),
        click.Option(
            ["--interface", "interfaces"],
            multiple=True,
            metavar="NAME",
            help="Name of the nodes' network interface (default: ens5). If repeated, the nodes take the "
            "names in turn.",
        ),
        click.Option(
            ["--policy"],
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="IAM policy (JSON) of the user that this simulator's key belongs to, instead of full "
            "access.",
        ),
        click.Option(
            ["--scp"],
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Service control policy (JSON) of the account's organization; it limits every user.",
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

stop = Verb(
    "stop",
    "cloudddp.cli.actions.simulator:stop",
    only_own_options=True,
    help="""Stop the simulator and every process of its nodes.

    Also cleans up after a simulator that has crashed.

    \b
    Example:
      cloudddp sim stop
    """,
)

status = Verb(
    "status",
    "cloudddp.cli.actions.simulator:status",
    only_own_options=True,
    params=[JSON],
    help="""Show the simulator and its nodes.

    \b
    Example:
      cloudddp sim status
    """,
)

env = Verb(
    "env",
    "cloudddp.cli.actions.simulator:env",
    only_own_options=True,
    help="""Print the variables that point AWS clients at the simulator.

    They are enough for API calls. If nodes are separate hosts (namespaces), their addresses exist only inside
    the simulator's network: use `cloudddp sim shell` or `cloudddp sim exec` for SSH to them.

    \b
    Example:
      eval "$(cloudddp sim env)"
    """,
)

shell = Verb(
    "shell",
    "cloudddp.cli.actions.simulator:shell",
    only_own_options=True,
    help="""Open a shell inside the simulator's network.

    Every AWS client in it uses the simulator. Nodes that are separate hosts (namespaces) can only be reached
    from there; the other networks of this computer and the internet cannot be reached. Process nodes have no
    network of their own, so with them the shell stays in this computer's network.

    \b
    Example:
      cloudddp sim shell
    """,
)

exec_ = Verb(
    "exec",
    "cloudddp.cli.actions.simulator:exec_",
    only_own_options=True,
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

session = Verb(
    "session",
    "cloudddp.cli.actions.simulator:session",
    only_own_options=True,
    params=[
        click.Option(["--target"], required=True, metavar="ID", help="Instance id of the node."),
        click.Option(
            ["--port"],
            type=click.IntRange(1, 65535),
            default=22,
            metavar="PORT",
            show_default=True,
            help="Port of the node.",
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
    "fault",
    "cloudddp.cli.actions.simulator:fault",
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
    "interrupt",
    "cloudddp.cli.actions.simulator:interrupt",
    params=[
        click.Argument(["node"]),
        click.Option(
            ["--seconds"],
            type=Finite(0, 600),
            default=120.0,
            metavar="S",
            show_default=True,
            help="Length of the notice.",
        ),
    ],
    help="""Interrupt a spot node, after EC2's notice.

    NODE is named as in `cloudddp sim fault`.

    \b
    Example:
      cloudddp sim interrupt 1 --seconds 30
    """,
)

maintenance = Verb(
    "maintenance",
    "cloudddp.cli.actions.simulator:maintenance",
    params=[
        click.Argument(["node"]),
        click.Option(
            ["--code"],
            metavar="KIND",
            type=click.Choice(
                [
                    "instance-reboot",
                    "system-reboot",
                    "system-maintenance",
                    "instance-retirement",
                    "instance-stop",
                ]
            ),
            default="instance-reboot",
            show_default=True,
            help="What will happen: instance-reboot, system-reboot, system-maintenance, instance-retirement, "
            "instance-stop.",
        ),
        click.Option(
            ["--seconds"],
            type=Finite(0, 600),
            default=600.0,
            metavar="S",
            show_default=True,
            help="Time until it begins.",
        ),
    ],
    help="""Schedule maintenance of a node, as AWS does.

    NODE is named as in `cloudddp sim fault`. The metadata and DescribeInstanceStatus announce it.

    \b
    Example:
      cloudddp sim maintenance 1 --code system-reboot
    """,
)

conditions = Verb(
    "conditions",
    "cloudddp.cli.actions.simulator:conditions",
    only_own_options=True,
    params=[
        click.Argument(["changes"], required=False),
        click.Option(["--clear"], is_flag=True, help="Reset all conditions."),
    ],
    help="""Change EC2 and network conditions: capacity, latency.

    CHANGES are JSON; without them, the current conditions are shown. docs/simulator.md lists them.

    \b
    Example:
      cloudddp sim conditions '{"quota": {"on-demand-g": 8}}'
    """,
)
