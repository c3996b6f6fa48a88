"""cloudddp's program on a node: inspects the machine, receives files, starts ranks, keeps their logs.

Standard library only, Python 3.9 or newer; only s3/upload.py, a process of its own, needs a Python that has
boto3. The laptop builds these modules and the protocol into one archive (cloudddp/agent/program.py), copies
it over SSH and runs it: one process (`serve`) does the steps of a laptop's command. Afterwards only one
supervisor per job runs, so the laptop may disconnect and reconnect: the state of a job is in JSON files that
are replaced atomically, below ~/.cloudddp/jobs/JOB/. The agent does not depend on torch.

    steps/          what the laptop calls; `start` forks a guard, which outlives the connection
      gang/         guard -> supervisor: joins the other nodes, runs attempts, decides the verdict with them
        watch/      what the supervisor notices: stalls, stragglers, isolated ranks, notices of EC2
        share/      what it copies between nodes before ranks start, and before a node ends
        s3/         what its guard copies to S3 when the job has ended
      sync/         for `receive`: writes files of the project, on the first node serves them to the others
        files/      what is in the project, and who wrote it: syncs, jobs, other nodes
        ranks/      launcher -> `rank`, a wrapper for each rank -> the user's script; why a rank ended
          jobs/     the record of each job, below ~/.cloudddp/jobs: all that outlives a process
            node/   processes, programs, the store, connections

Data comes in as requests on stdin (steps/), messages of the other agents (gang/mesh.py), files (sync/,
share/), and what ranks write: logs, their training status, their steps.

Imports go down only (.importlinter). Each step is the module of its name in steps/, with `REQUEST`, the type
of its request, and `step(request)`.

A new step is a module there, its name in `dispatch.STEPS` and in .importlinter, and its messages in the
protocol. A module imports what it needs at its top, so that a running step does not read its files again,
which may be replaced. Exceptions are what takes 30 ms and few jobs need, and the wrapper of a rank, for which
the rank waits.
"""
