# Prints when the timer of the deadline ends this node, nothing where it is not armed. With arguments it moves the deadline
# before: to EPOCH, in seconds since 1970, which is in LEFT seconds by the clock of the laptop. The laptop runs this:
#
#   sh -s -- [EPOCH LEFT] < move-deadline.sh
#
# The files are root's, as user data has written them (cloudddp/cluster/user_data.py). Each is replaced atomically, and the
# check of later boots before the timer, whose own calendar catches up with a time that has passed.
set -eu
if [ $# != 0 ]; then
    sudo -n sh -s -- move-deadline "$@" <<'END'
set -eu
replace() {
    sed "$2" "$1" > "$1.new"
    chmod --reference="$1" "$1.new"
    sync "$1.new"
    mv -f "$1.new" "$1"
}
case $(systemctl is-active cloudddp-deadline.service) in
activ*) echo "this node is already powering off" >&2; exit 1 ;;
esac
calendar=$(date -u -d "@$2" '+%Y-%m-%d %H:%M:%S UTC')
uptime=$(cut -d . -f 1 /proc/uptime)
replace /var/lib/cloud/scripts/per-boot/cloudddp-deadline "s/ -lt [0-9]* / -lt $2 /"
replace /etc/systemd/system/cloudddp-deadline.timer \
    "s/^OnCalendar=.*/OnCalendar=$calendar/; s/^OnBootSec=.*/OnBootSec=$((uptime + $3 + 1))/"
systemctl daemon-reload
systemctl restart cloudddp-deadline.timer
END
    # For jobs that run, by this node's clock: agent/jobs/poweroff.py.
    umask 077
    mkdir -p ~/.cloudddp
    echo $(($(date +%s) + $2)) > ~/.cloudddp/deadline.new
    mv -f ~/.cloudddp/deadline.new ~/.cloudddp/deadline
fi
next=$(TZ=UTC systemctl show cloudddp-deadline.timer -p NextElapseUSecRealtime | cut -d = -f 2-)
set -- $next # "Sun 2026-11-29 12:00:00 UTC"; not every date(1) reads it
[ $# -lt 3 ] || echo "$2T$3Z"
