# What type checkers know of the names that __init__.py loads when they are used.
from cloudddp.api import CloudDDPError as CloudDDPError
from cloudddp.api import Cluster as Cluster
from cloudddp.api import Job as Job
from cloudddp.api import JobResult as JobResult
from cloudddp.api import Leftovers as Leftovers
from cloudddp.api import Node as Node
from cloudddp.api import UsageError as UsageError
from cloudddp.api import attach as attach
from cloudddp.api import run as run
from cloudddp.api import sim as sim
from cloudddp.api import up as up

__version__: str
