"""The SSH server of a loopback node (asyncssh): logins, sessions, host keys, and the commands that it
stubs."""
