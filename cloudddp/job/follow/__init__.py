"""Following a job: an event stream per node, one queue, a state that events are applied to, and a pure
decision.

- `stream`: turns the agent's frames of one node into events, and reconnects. A thread per node reads it.
- `events`: the events of all nodes, and the bounded queue that holds them.
- `state`: `FollowState.apply(event, now)`, pure.
- `decide`: `decide(state, timing, now)` returns the next action, pure.
- `verdict`: `verdict(state, job, wall)` returns how the job ended, pure.
- `follower`: the loop that connects them and executes the actions.
"""
