# Ends a command of `cloudddp exec` and all that it has started, in any group of processes, and exits with 1 if something is
# left:
#
#   sh -s -- MARK < end-exec.sh
#
# The shell of the command has CLOUDDDP_EXEC=MARK in its arguments, and what it started has it in its environment.
for signal in INT TERM KILL; do
    look=0
    while [ $look -lt 25 ]; do
        pids=$(grep -lzse "[C]LOUDDDP_EXEC=$1" /proc/[0-9]*/environ /proc/[0-9]*/cmdline | cut -d / -f 3 | sort -u)
        [ -n "$pids" ] || exit 0
        # shellcheck disable=SC2086  # one word for each process
        [ $look != 0 ] || kill -s $signal $pids 2> /dev/null
        sleep 0.2
        look=$((look + 1))
    done
done
exit 1
