"""EC2 on a laptop: a server that answers EC2's API, with a real SSH node behind every instance.

The only room that knows moto, asyncssh and werkzeug, and it imports them late: `control` (start, find, stop)
is plain standard library, so that a command which only asks for the simulator pays for none of them. Nothing
here knows clusters, jobs or the command line.
"""
