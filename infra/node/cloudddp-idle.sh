#!/bin/sh
# Powers this node off once it has been idle for @IDLE@ seconds (0: never), or after a job that was launched with --down, if
# no agent is left that would. Never while a job runs. The timer of the same name runs it as root. Times are by
# /proc/uptime, since the clock may be set.
used=/run/cloudddp-in-use # seconds of uptime at which the node was last in use
free=/run/cloudddp-free   # the same for the last time that a job ran or the plan changed, and the plan's checksum
read -r now _ < /proc/uptime
now=${now%.*}

power_off() {
    echo "$1: powering off"
    systemctl start --no-block cloudddp-deadline.service
    exit
}

# The agent of a job or of its setup, or a rank that has lost its agent (infra/node/agent/node/kernel.py).
job_runs() {
    pgrep -x cloudddp-job > /dev/null ||
        grep -qsz '^CLOUDDDP_TASK=[^/]*/[0-9]*$' /proc/[0-9]*/environ
}

# The plan of the login user, who may write anything there: at most 1000 bytes of a regular file are read.
plan() {
    for file in /home/*/.cloudddp/poweroff.json /root/.cloudddp/poweroff.json; do
        [ -f "$file" ] && timeout 5 head -c 1000 "$file" && return
    done
}

# Seconds since an SSH client last sent something, or acknowledged what the node sent: a user may watch the output of a
# program. Nothing without a connection. A client that is gone does neither, and its connection may stay for hours.
ssh_age() {
    ss -Htin state established '( sport = :@PORT@ )' 2> /dev/null | awk '
        /^[^ \t]/ { connections++; next }
        { infos++; age = match($0, /lastrcv:[0-9]+/) ? substr($0, RSTART + 8, RLENGTH - 8) / 1000 : 0
          if (match($0, /lastack:[0-9]+/) && substr($0, RSTART + 8, RLENGTH - 8) / 1000 < age)
              age = substr($0, RSTART + 8, RLENGTH - 8) / 1000
          if (infos == 1 || age < least) least = age }
        END { if (connections) printf "%d", infos < connections ? 0 : least }'
}

in_use() {
    job_runs && return
    # A job that ends its node, a session of AWS's Session Manager, a login on a console. The kernel keeps 15 characters of
    # a name (this one is ssm-session-worker), and `who` is empty on systems without utmp.
    for name in cloudddp-wait ssm-session-wor login; do
        pgrep -x "$name" > /dev/null && return
    done
    return 1
}

planned=$(plan | tr -d '\0')
seconds=$(printf '%s' "$planned" | sed -n 's/.*"seconds": *\([0-9]\{1,9\}\)[.,}].*/\1/p' | head -n 1)
key=$(printf '%s' "$planned" | cksum)
if [ -z "$seconds" ]; then
    rm -f $free
elif job_runs || ! read -r since seen 2> /dev/null < $free || [ "$seen" != "$key" ]; then
    echo "$now $key" > $free
elif [ $((now - since)) -ge "$seconds" ]; then
    power_off "no job has run for $((now - since)) s, and one was launched with --down"
fi

[ @IDLE@ -gt 0 ] || exit 0
# The first run after each boot only begins to count.
if [ ! -s $used ] || in_use; then
    echo "$now" > $used
    exit
fi
read -r since < $used
age=$(ssh_age)
if [ -n "$age" ] && [ $((now - age)) -gt "$since" ]; then
    since=$((now - age))
    echo "$since" > $used
fi
[ $((now - since)) -lt @IDLE@ ] || power_off "this node has been idle for $((now - since)) s"
