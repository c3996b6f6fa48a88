"""The help of every setting, by section and key: for `--help`, cloudddp.toml and the reference.

It is apart from spec.py, which has their types and limits: `--help` reads it, and must not import msgspec.
"""

from __future__ import annotations

# `key: text` below its section; a line that is indented continues the one above.
_TEXT = """\
[cluster]
name: Name of the cluster: the value of its `cloudddp:cluster` tag. Default: made from the name of the
  project's folder.
nodes: Number of nodes.
instance_type: EC2 instance type of every node; or several (A,B), or a GPU (H100:8).
max_hours: Nodes terminate after this many hours. This cannot be switched off.
idle_minutes: A node that had no job and no SSH connection for so many minutes terminates by itself; 0
  switches this off.
max_cost: Maximum cost of the cluster in USD, enforced as an earlier deadline.
price: USD per node and hour, for an instance type whose price cloudddp does not know.
spot: Use spot instances (AWS may interrupt them at any time); `--spot prefer`: else on-demand ones.
reservation: Id of an on-demand capacity reservation or a capacity block to launch into.
placement_group: Place two nodes or more close together, in a placement group of strategy cluster.
efa: Use EFA between two nodes or more, on all network cards, if the instance type has it.
require_efa: Fail if EFA is missing: on the instance type, on a node, or when a rank starts NCCL.
allow_cpu: Accept nodes without a GPU, or with defective ones.
region: AWS region. Default: AWS_REGION, or that of the AWS profile.
regions: Regions in which `up` and `capacity` look for capacity, in this order. Other commands use the one
  where the cluster is.
zones: Availability zones in which `up` looks for capacity, in this order. All nodes are in one zone. Default:
  every zone that offers the type and has a subnet with enough free addresses.
wait_capacity: How long `up` keeps trying if no zone has capacity, such as 30m or 2h. 0 does not wait. Nothing
  runs between two attempts; a launch that AWS accepts and then ends is billed, and counts against max_cost.
vpc: VPC: an id, or tag:KEY=VALUE. Default: that of the subnets, or the default VPC.
subnets: Subnets of one VPC, by id or tag:KEY=VALUE, in the order in which `up` looks for capacity. Default:
  those of the VPC.
image: AMI id, or an SSM parameter that holds one; {arch} becomes x86_64 or arm64.
user: Login user. Default: that of the image's operating system.
ssh_port: Port of the nodes' SSH server.
ssh_from: CIDR blocks that may connect with SSH. Default: this computer's address only.
connect: How SSH reaches the nodes: by public address, by private address (VPN), or by proxy_jump.
proxy_jump: Jump host for SSH to private nodes, as for `ssh -J`; its host key must be in your known_hosts.
proxy_command: Command that connects to a node's SSH server, as ssh's ProxyCommand: %h is the instance id, %a
  the address.
disk_gb: Size of the root volume in GiB (gp3, encrypted).
disk_throughput: Throughput of the root volume in MiB/s: a new volume is read from its snapshot at first.
  Above 125, each MiB/s costs about $0.04 a month, above 750 about $0.06; the price includes it.
volume_init_rate: Rate in MiB/s at which AWS copies the image to the root volume after its creation; else each
  block comes when it is first read. Billed per GiB of the image and node, once; the price does not include
  it.
kms_key: KMS key of the root volume: an id, alias/NAME or an ARN. Default: the account's key for EBS.
instance_profile: Instance profile of the nodes, by name or ARN: jobs get the permissions of its role.
  Default: none.
imds_hop_limit: Hops of responses of the nodes' metadata service: 2 lets containers use it.
tags: More tags for everything that `up` creates, as an organization may require. Tags are not secret.
ready_minutes: Minutes that a node may take to answer SSH before `up` gives up. Default: 10; with several
  GPUs, and from 12xlarge on, 30; metal 40.
[job]
nproc_per_node: Ranks per node: a number, a list with one number per node, or 'gpu': one per GPU (1 without
  GPUs).
rendezvous: How ranks find each other: torchrun's c10d or static, or direct (no torchrun; RANK etc. are set).
positional_ranks: With rendezvous direct: append RANK and LOCAL_RANK to the script's arguments.
master_port: Port of the rendezvous on node 0; 0 chooses a free one.
max_restarts: Passed to torchrun as --max-restarts. Across nodes torchrun does not recover reliably; leave it
  at 0.
torchrun_args: More options of torchrun, such as ["--numa-binding=node"]. Not those that cloudddp sets itself.
python: Python on the nodes. If empty: /opt/pytorch/bin/python where it exists, else python3.
container: Docker image in which ranks and setup commands run, with the GPUs, EFA devices and network of the
  node; every node pulls it before the job. `python` is then a path in the image (python3). '' for none.
stop_grace: Seconds between SIGTERM and SIGKILL when ranks are stopped.
save_minutes: Minutes before the cluster's deadline, and before a scheduled maintenance of a node, at which
  ranks get SIGTERM, to save a snapshot and exit.
retries: How often within an hour a job that has failed is started again, on all nodes. Errors of the script
  itself are not repeated.
nodes_min: If a lost node cannot be replaced, resume the job with the nodes that are left if they are at least
  this many. Default: all.
preflight: Check, before ranks start, that all nodes have the same GPUs, driver, Python, torch, CUDA and NCCL,
  space on their disks and clocks within 2 s.
heartbeat: Seconds after which a node that sends nothing to the others is lost, and the job ends on all of
  them.
stall_minutes: Minutes without output, training status, CPU or GPU activity of any rank after which a job has
  stalled. 0 watches nothing.
on_stall: What happens to a stalled job, after its stacks were read: kill it, restart it (counts as one of
  `retries`), leave it, or kill it and shut the nodes down after `launch --keep` (30 minutes), which ends the
  cluster.
log_mb: MiB of each rank's log that its node keeps: the beginning and the end. The middle of a longer log is
  dropped.
notify: Where the nodes send how the job has ended, that it has stalled, that AWS ends a node, and that the
  deadline is near: a URL, which gets JSON that Slack and Discord show, or a command that runs on the node.
  '$NAME' takes it from that variable of the job (`-e NAME`), so that no file has it; '' switches it off.
outputs: Folders or files in the project that the script writes on the nodes; `pull` and `run` copy them back.
  Default: every file that jobs wrote in the project, up to `pull_mb`.
pull_mb: Without `outputs`: how many MiB of a node's new files `pull` and `run` copy. Of more, they copy small
  files and the newest checkpoints, and name the others.
snapshots: Patterns of the script's snapshots in the project, such as 'runs/**/*.pt'. Before ranks start, only
  the newest file of all is copied to the nodes that lack it; a node that AWS is about to end sends its newest
  one to a node that stays. Not needed where every node holds a snapshot, as with `--snapshot-per-node` of
  train/. `share` takes its place where both are set.
share: Files and folders that the script writes in the project on some nodes and reads on all, such as
  'snapshot.pt' or 'out'; patterns as for `snapshots`. Before ranks start, the newest version of each file is
  copied to the nodes that lack it.
share_mb: Without `share` and `snapshots`: before ranks start, files that jobs wrote (in `outputs`, or
  anywhere in the project) are copied to the nodes that have no file of that name, up to this many MiB from
  each node. 0 copies nothing.
scratch: Folders or files that the script writes there and that are not results (a downloaded data set): `run`
  terminates nodes that hold them.
results_s3: Where the nodes copy outputs and logs when a job has ended, with the role of
  cluster.instance_profile: an S3 bucket and a prefix. `pull` reads them there once the cluster no longer
  exists. Default: nowhere.
env: Environment variables of every rank.
[sync]
exclude: More patterns to exclude, in the syntax of .gitignore.
include: Files to send although .gitignore names them, such as 'data/', in the syntax of .gitignore; the exact
  path of a file also sends one that is withheld for its name.
max_mb: Refuse to send more than this many MiB to a node (a data set or a .venv, by mistake).
[data]
source: Folder on this computer, relative to the project or absolute, which is sent like the project's files;
  or an S3 prefix, which every node copies with the role of cluster.instance_profile.
path: Where ranks find it in the project. Default: the source's own path, or its last part.
mode: How nodes get it: a copy on each node's disk.
[shared]
path: Where ranks find it in the project.
source: Where it is: node0, on whose disk it ends with that node; or the id of a file system of EFS or FSx for
  Lustre in the cluster's VPC, which outlives the cluster.
[setup]
environment: File that lists the project's packages, which are installed before the commands: requirements.txt
  or pyproject.toml (pip), uv.lock (uv) or environment.yml (conda or micromamba, if the image has it). The
  image's torch is kept unless that file asks for another.
extras: Extras of the project that are installed, too, with pyproject.toml or uv.lock.
wheels: Folder of wheels in the project (`pip download -d`), from which packages are installed where nodes
  reach no package index: in private subnets and in the simulator.
run: Shell commands, run in order; the first that fails stops the launch.
inputs: Files that rerun the commands when they change, e.g. requirements.txt.
"""


def _read(text: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    section = ""
    for entry in text.replace("\n  ", " ").splitlines():
        key, _, words = entry.partition(": ")
        if words:
            found[section][key] = words
        else:
            section = entry.strip("[]")
            found[section] = {}
    return found


DESCRIPTIONS = _read(_TEXT)
