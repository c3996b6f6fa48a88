"""This machine and the agent's store on it: processes, programs, memory that processes share, the instance
metadata, connections.

It knows of no job, and imports nothing else of the agent."""
