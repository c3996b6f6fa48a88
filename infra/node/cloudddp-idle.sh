#!/bin/sh
# Ends this node once it has been idle for @IDLE@ seconds: no job of cloudddp, no SSH connection, nobody logged in. The
# timer of the same name runs it as root. Times are by /proc/uptime, since the clock may be set.
last=/run/cloudddp-in-use # seconds of uptime at which the node was last in use
read -r now _ < /proc/uptime
now=${now%.*}

in_use() {
    # Every job has a process of the agent until its nodes may end; a set-up runs over SSH.
    pgrep -f '[.]pyz guard [0-9]' > /dev/null && return
    who | grep -q . && return
    pgrep -x ssm-session-worker > /dev/null && return
    # Established connections of the SSH server. Port and state are hexadecimal.
    cat /proc/net/tcp /proc/net/tcp6 2> /dev/null | awk '$2 ~ /:@PORT@$/ && $4 == "01" { found = 1 } END { exit !found }'
}

# The first run after each boot only begins to count.
if [ ! -s $last ] || in_use; then
    echo "$now" > $last
    exit
fi
read -r since < $last
if [ $((now - since)) -ge @IDLE@ ]; then
    echo "this node has been idle for $((now - since)) s: powering off"
    systemctl start --no-block cloudddp-deadline.service
fi
