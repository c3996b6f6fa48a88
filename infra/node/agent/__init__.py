"""cloudddp's program on a node: inspects the machine, receives files, starts ranks, keeps their logs and exit
codes.

Standard library only, Python 3.9 or newer. The laptop builds these modules and the protocol into one .pyz
(cloudddp/agent/build.py), copies it over SSH and runs it: one process (`serve`) does the steps of a laptop's
command. Afterwards only one supervisor per job runs, so the laptop may disconnect and reconnect: the state of
a job is in JSON files that are replaced atomically, below ~/.cloudddp/jobs/JOB/. The agent does not depend on
AWS or torch.

        laptop: `serve`, or one STEP                              the agents of the other nodes
                    |                                                          |
    steps/      dispatch -> one module per step, forked by `serve`             |
                    |                    |                                     |
                    |                  start forks                             |
                    |                    v                                     |
    gang/           |    guard -> supervisor: mesh, joining, decision <--------+
                    |      |          |     |                                  |
    share/ s3/ sync/|      |  files before the start; results; the sync <------+
    files/ watch/   |      |          |   what ranks do, what the project holds
                    v      v          v
    ranks/      launchers -> torchrun -> `rank` (one wrapper per rank) -> the user's script
                    |                      |
    jobs/       state.json, verdict.json, ranks/N.json, logs: all that outlives a process
                    |
    node/       kernel, processes, store, commands

Imports go down only (.importlinter). Each step is the module of its name in steps/, with `REQUEST`, the type
of its request, and `step(request)`:

    probe      inspect the machine; compare the project's files
    receive    delete and write files of the project, from the laptop or from another node
    setup      run the project's setup commands, once for each content
    start      start a job's processes on this node, detached
    follow     write a job's logs and states to stdout as they are produced
    kill       end every process of a job, and check that none is left
    conclude   record the verdict of the other nodes on one whose agent could not take part
    jobs       list the jobs of this node
    stacks     read the stacks of a job's ranks
    poweroff   change when this node powers off by itself
    new_files  list the files that jobs wrote into the project and that were not pulled yet
    pulled     record what has been pulled
    pack       write files of the project to stdout, as far as the laptop lacks them

A new step is a module there, its name in `dispatch.STEPS`, and its messages in the protocol. A module imports
what it needs at its top, so that a running step does not read the .pyz again, which may be replaced.
Exceptions are what takes 30 ms and few jobs need, and the wrapper of a rank, for which the rank waits.
"""
