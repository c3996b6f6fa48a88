"""cloudddp's program on a node: inspects the machine, receives files, starts ranks, keeps their logs and exit codes.

Standard library only, Python 3.9 or newer. The laptop builds these modules and the protocol into one .pyz
(cloudddp/agent/build.py), copies it over SSH and runs it: one process (`serve`) does the steps of a laptop's command.
Afterwards only one supervisor per job runs, so the laptop may disconnect and reconnect: the state of a job is in JSON files
that are replaced atomically, below ~/.cloudddp/jobs/JOB/. The agent does not depend on AWS or torch.

Each step is the module of its name with `REQUEST`, the type of its request, and `step(request)`:

    probe      inspect the machine; compare the project's files
    receive    delete and write files of the project, from the laptop or from another node
    setup      run the project's setup commands, once for each content
    start      start a job's processes on this node, detached
    follow     write a job's logs and states to stdout as they are produced
    kill       end every process of a job, and check that none is left
    jobs       list the jobs of this node
    new_files  list the files that jobs wrote into the project and that were not pulled yet
    pulled     record what has been pulled
    pack       write files of the project to stdout, as far as the laptop lacks them

`serve` does one step after another, each in a fork. `guard`, `supervisor` and `rank` are the processes of a job; `upload`
copies its results to S3. Every module imports what it needs at its top, so that a running step does not read the .pyz again,
which may be replaced.
"""
