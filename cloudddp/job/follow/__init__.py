"""Following a job: `stream` turns the agent's frames of each node into `events`, in a thread per node, and
reconnects; the loop of `follower` applies them to a `state`, does what `decide` returns, and returns the
`verdict`. These three are pure."""
