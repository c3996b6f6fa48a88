"""The verbs on clusters: up, down, extend, doctor, capacity, status, top, ls, cost, allow-me."""

from __future__ import annotations

import click

from cloudddp.cli.commands.options import ANYONE, CLUSTER_SETTINGS, DRY_RUN, JSON, YES, Finite, flag
from cloudddp.cli.lazy_commands import Option, Verb

# Lengths of capacity blocks: 1 to 14 days, then whole weeks up to 26 (EC2 User Guide, "Capacity Blocks for
# ML").
BLOCK_DAYS = [str(days) for days in (*range(1, 15), *range(21, 183, 7))]

up = Verb(
    "up:up",
    params=[*CLUSTER_SETTINGS, DRY_RUN, YES],
    help="""Create the cluster: nodes that are ready to train.

    The nodes terminate at their deadline, also without this computer. If anything fails, or you press Ctrl-C,
    everything that was created is removed. If the cluster exists, nothing is changed.

    \b
    Example:
      cloudddp up -n 2 -t g5.xlarge --max-hours 4 --max-cost 10
    """,
)

down = Verb(
    "down:down",
    params=[ANYONE, YES],
    help="""Remove the cluster and verify that nothing is left.

    Finds its resources by tag, so it works from any computer with access to the account. Only your own
    resources are removed (with --anyone, also those of others). A cluster that is not where the settings or
    this computer's records say is looked for in every enabled region; with --region, only that one is
    changed. If anything is left, or a region could not be asked, it is listed and the exit code is 3. It is
    safe to repeat.

    \b
    Example:
      cloudddp down -c my-project
    """,
)

doctor = Verb(
    "doctor:doctor",
    params=[
        *CLUSTER_SETTINGS,
        flag(
            "--trial",
            "Then create one node (g4dn.xlarge, at most $1), use it, remove it, and write a report.",
        ),
        JSON,
        YES,
    ],
    help="""Check whether `up` would work, without creating anything.

    Checks this computer, credentials, clock, instance type, image, network, price, quota and permissions with
    the settings that `up` would use. The exit code is 1 if a check fails.

    With --trial, it then asks, creates one cheap node, runs the checks of `up` and a command on it, and
    removes it. The node's deadline is 40 minutes. The report has versions, times and AWS's error codes, and
    neither ids nor addresses: it can be attached to an issue.

    \b
    Examples:
      cloudddp doctor -n 4 -t p5.48xlarge --regions us-east-1,us-west-2
      cloudddp doctor --trial
    """,
)

capacity = Verb(
    "capacity:capacity",
    params=[
        *(one for one in CLUSTER_SETTINGS if one.key in ("nodes", "instance_type", "regions")),
        Option(
            "--days",
            "D",
            "Days of a capacity block: 1 to 14, or whole weeks up to 182. [default: 1]",
            click.Choice(BLOCK_DAYS),
            default="1",
        ),
        JSON,
    ],
    help="""Show where AWS has or sells capacity; buy nothing.

    For each region and type: the zones that offer it, the prices on demand and on the spot market, AWS's spot
    placement score of N instances in one zone, your quotas, and the capacity blocks for sale, with the
    command that buys one. Only a launch shows what is free on demand.

    \b
    Examples:
      cloudddp capacity -t p5.48xlarge -n 4 --days 2 --region us-east-2
      cloudddp capacity --gpu H100:8 --json | jq '.[].blocks[].usd'
    """,
)

status = Verb(
    "status:status",
    params=[JSON, flag("--watch", "Show what `top` shows, until Ctrl-C.")],
    help="""Show the cluster's nodes, deadline and cost so far.

    The exit code is 1 if there is no such cluster in any region; what is left of one without nodes is listed.
    Makes one AWS call, if the cluster is where the settings or this computer's records say. With --watch,
    --json prints one object after the other, without end.

    \b
    Example:
      cloudddp status --json | jq '.[].usd_so_far'
    """,
)

top = Verb(
    "top:top",
    params=[ANYONE, JSON, flag("--once", "Show one reading of every node, and exit.")],
    help="""Show GPUs, ranks, progress and cost as they are now, live.

    Each rank is beside the GPU that has the same place on the node; slow ranks are first. Above are the
    numbers that rank 0 writes into its status file. Jobs that start or end meanwhile are followed.

    Ends with Ctrl-C, and exits with 0. The nodes measure every 2 seconds. Without a terminal it prints a line
    per rank each time; with --json, an object. Nodes that do not answer are shown and retried.

    \b
    Examples:
      cloudddp top
      cloudddp top --once --json | jq '.metrics.loss'
    """,
)

ls = Verb(
    "status:ls",
    params=[flag("--all-regions", "List every region that is enabled in the account."), JSON],
    help="""List cloudddp clusters, and remains, of any owner.

    The remains are what was left when nodes ended at their deadline, such as Elastic IPs, which are billed.

    Asks the configured regions, and those in which this computer has created clusters that are not known to
    be gone; if there is none, every enabled region; with --region, only that one. Makes four AWS calls per
    region.

    \b
    Example:
      cloudddp ls --all-regions
    """,
)

extend = Verb(
    "extend:extend",
    params=[
        Option("--hours", "H", "H hours after the current deadline.", Finite(0, 336, min_open=True)),
        Option("--until", "TIME", "18:00 (today), 2026-12-01T08:00 (local) or 2026-12-01T08:00Z."),
        Option(
            "--max-cost",
            "USD",
            "The time at which the whole cluster will have cost that much.",
            Finite(0, min_open=True),
        ),
        ANYONE,
        YES,
    ],
    help="""Move the deadline of the cluster, later or earlier.

    Moves the timer and the tag of every node, after it has shown both deadlines and the cost. Running jobs
    are warned at the new one. At most 336 hours after the creation, and not beyond max_cost of the
    configuration.

    If a node cannot be reached, the others are moved, it is named, and the exit code is 1. It is safe to
    repeat.

    \b
    Examples:
      cloudddp extend --hours 4
      cloudddp extend --until 18:00
    """,
)

cost = Verb(
    "cost:cost",
    params=[JSON],
    help="""Show what your clusters have cost, by month and project.

    Also those that have ended: from AWS, which lists instances for an hour, and from what this computer has
    recorded. A cluster that ended without `down` counts until its deadline ("at most"). Works without AWS,
    with a warning. Estimates by list prices; data transfer, snapshots and taxes are not counted.

    \b
    Example:
      cloudddp cost --json | jq 'map(.usd) | add'
    """,
)

allow_me = Verb(
    "allow_me:allow_me",
    params=[ANYONE],
    help="""Allow SSH from this computer's current address.

    The address that it had before is no longer allowed.

    \b
    Example:
      cloudddp allow-me && cloudddp logs -f
    """,
)
