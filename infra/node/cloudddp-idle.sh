#!/bin/sh
# Ends this node once it has been unused for its grace: the `seconds` that a job with --down has left in poweroff.json, else
# @IDLE@. The timer of the same name runs it as root, each @EVERY@ s. Times are seconds of uptime, since the clock may be set;
# after a boot /run is empty, and all counts anew.
state=/run/cloudddp-unused   # when the node was last used, by an agent, by a client; and the plan's checksum
ending=/run/cloudddp-ending  # the node ends: no job may start any more (infra/node/agent/jobs/poweroff.py)
read -r now _ < /proc/uptime
now=${now%.*}

# The plan of the login user, who may write anything there: at most 1000 bytes of a regular file are read.
plan() {
    for file in /home/*/.cloudddp/poweroff.json /root/.cloudddp/poweroff.json; do
        [ -f "$file" ] && [ ! -L "$file" ] && timeout 5 head -c 1000 "$file" && return
    done
}

number() {
    printf '%s' "$planned" | sed -n 's/.*"'"$1"'": *\([0-9]\{1,9\}\)[.,}e].*/\1/p' | head -n 1
}

has_verdict() {
    for home in /home/* /root; do
        [ -e "$home/.cloudddp/jobs/$1/verdict.json" ] && return
    done
    return 1
}

# The agents of a job, from its setup to its last copy.
agent_runs() {
    pgrep -x cloudddp-job > /dev/null
}

saves() {
    agent_runs || { pgrep -x cloudddp-rank > /dev/null && [ $((now - by_job)) -le 1000 ]; }
}

# A process of a job whose agents were killed: a rank may save while its wrapper runs, which ends it within 910 s. What a job
# with a verdict has left is ended, and what has no wrapper.
orphan_runs() {
    kept=1
    for file in $(timeout 20 grep -lsz '^CLOUDDDP_TASK=[0-9A-Za-z-]*/[0-9]*$' /proc/[0-9]*/environ); do
        task=$(grep -hsz -m 1 '^CLOUDDDP_TASK=[0-9A-Za-z-]*/[0-9]*$' "$file" | tr -d '\0')
        [ -n "$task" ] || continue  # it has ended
        job=${task#*=} pid=${file#/proc/}
        if has_verdict "${job%/*}" || ! saves; then kill -KILL "${pid%/environ}"; else kept=0; fi
    done
    return $kept
}

# Seconds since an SSH client last sent something, or acknowledged what the node sent: a user may watch the output of a
# program. Nothing without a client that has logged in: sshd names its process after the user, and before that with a [.
ssh_age() {
    ss -Htinp state established '( sport = :@PORT@ )' 2> /dev/null | awk -v files="$(
        timeout 20 grep -lszE '^sshd(-session)?: [^][]+$' /proc/[0-9]*/cmdline | tr '\n' ' ')" '
        BEGIN { split(files, file, /[^0-9]+/) }
        /^[^ \t]/ { known = 0; for (i in file) if (file[i] && index($0, "pid=" file[i] ",")) known = 1; next }
        known { age = match($0, /lastrcv:[0-9]+/) ? substr($0, RSTART + 8, RLENGTH - 8) / 1000 : 0
          if (match($0, /lastack:[0-9]+/) && substr($0, RSTART + 8, RLENGTH - 8) / 1000 < age)
              age = substr($0, RSTART + 8, RLENGTH - 8) / 1000
          if (!clients++ || age < least) least = age }
        END { if (clients) printf "%d", least }'
}

# A session of AWS's Session Manager, a login on a console. The kernel keeps 15 characters of a name (this one is
# ssm-session-worker), and `who` is empty on systems without utmp.
console() {
    pgrep -x ssm-session-wor > /dev/null || pgrep -x login > /dev/null
}

# What looked unused is looked at once more: a job that starts meanwhile sees the mark, or is seen.
power_off() {
    : > $ending
    if agent_runs; then rm -f $ending; exit; fi
    echo "this node has been unused for $((now - last)) s: powering off"
    systemctl start --no-block cloudddp-deadline.service
    exit
}

planned=$(plan | tr -d '\0')
grace=$(number seconds)
key=$(printf '%s' "$planned" | cksum | tr -d ' ')
read -r last by_job by_client seen 2> /dev/null < $state || { last=$now by_job=$now by_client=$now seen=$key; }
[ ! -e $ending ] || power_off
if agent_runs || [ "$seen" != "$key" ]; then by_job=$now; fi
age=$(ssh_age)
if console || [ "${age:-@ALIVE@}" -lt @ALIVE@ ]; then age=0; fi
if [ -n "$age" ] && [ $((now - age)) -gt "$by_client" ]; then by_client=$((now - age)); fi
last=$by_client
if [ -n "$grace" ]; then # clients prolong this by so much at most
    most=$(number clients)
    most=$((by_job + ${most:-3600}))
    [ "$last" -le $most ] || last=$most
fi
[ "$last" -ge "$by_job" ] || last=$by_job
if orphan_runs; then last=$now by_client=$now; fi
echo "$last $by_job $by_client $key" > $state.new && mv $state.new $state
[ "$last" -eq "$now" ] || [ $((now - last)) -lt "${grace:-@IDLE@}" ] || power_off
