# Gives this node an SSH host key of its own. The one that it boots with is in its user data, which every process on
# the node can read from the instance metadata, and all nodes of a cluster share it. The laptop runs this as root:
#
#   sudo -n sh -s -- make-host-key OLD < host-key.sh      make a new key beside the one in use, print its public half
#   sudo -n sh -s -- install-host-key NEW < host-key.sh   put that one in place of every other, have sshd read it
#
# OLD and NEW are public keys, `ssh-ed25519 AAAA...`. The private key never leaves the node. Each step may be
# interrupted anywhere and repeated: a key that was made stays the one that is printed, until it is installed.
set -eu
umask 077
cd /etc/ssh
used=ssh_host_ed25519_key  # where cloud-init writes what the user data holds, and sshd looks by default
made=.cloudddp_host_key

public() {
    ssh-keygen -y -P '' -f "$1" < /dev/null | cut -d ' ' -f 1,2
}

case $1 in
make-host-key)
    now=$(public $used)
    if [ ! -s $made ] && { [ -z "$now" ] || [ "$now" = "$2" ]; }; then
        rm -f $made.$$ $made.$$.pub
        ssh-keygen -q -t ed25519 -N '' -C '' -f $made.$$ < /dev/null
        sync $made.$$  # before its public half is printed: it must survive a power failure
        ln $made.$$ $made 2> /dev/null || [ -s $made ]  # not mv: another run may have made one meanwhile
        rm -f $made.$$ $made.$$.pub
        sync .
    fi
    if [ -s $made ]; then public $made; else echo "$now"; fi
    ;;
install-host-key)
    if [ -s $made ] && [ "$(public $made)" = "$2" ]; then
        for other in ssh_host_*; do
            [ "$other" = $used ] || rm -f "$other"
        done
        mv -f $made $used  # one rename: sshd finds the old key or the new one, never none
    fi
    if [ "$(public $used)" != "$2" ]; then
        echo "/etc/ssh/$used is not the key that was made for this node" >&2
        exit 1
    fi
    rm -f $made*
    public $used > $used.pub
    chmod 644 $used.pub
    sync $used .
    # A reload (SIGHUP), not a restart: open connections stay whatever the unit's KillMode is. Ubuntu calls the unit ssh
    # (sshd is an alias that is missing under socket activation), Amazon Linux sshd. Where neither is active, each
    # connection starts an sshd of its own, which reads the new key by itself.
    for unit in ssh sshd; do
        if systemctl is-active --quiet $unit; then
            systemctl reload $unit
            break
        fi
    done
    ;;
*)
    echo "unknown step: $1" >&2
    exit 2
    ;;
esac
