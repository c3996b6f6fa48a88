# Gives this node an SSH host key of its own. The one that it boots with is in its user data, which every process on
# the node can read from the instance metadata, and all nodes of a cluster share it. The laptop runs this as root:
#
#   sudo -n sh -s -- make-host-key OLD < host-key.sh      create a new key next to the one in use, print its public half
#   sudo -n sh -s -- install-host-key NEW < host-key.sh   replace all host keys by the new one, and reload sshd
#
# OLD and NEW are public keys, `ssh-ed25519 AAAA...`. The private key never leaves the node. Each step may be
# interrupted at any point and repeated: a new key is created once and printed again until it is installed.
set -eu
umask 077
cd /etc/ssh
used=ssh_host_ed25519_key  # where cloud-init writes the key of the user data; sshd's default path
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
        ln $made.$$ $made 2> /dev/null || [ -s $made ]  # not mv: another run may have created one meanwhile
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
        mv -f $made $used  # atomic: sshd finds either the old key or the new one
    fi
    if [ "$(public $used)" != "$2" ]; then
        echo "/etc/ssh/$used is not the key that was made for this node" >&2
        exit 1
    fi
    rm -f $made*
    public $used > $used.pub
    chmod 644 $used.pub
    sync $used .
    # Ubuntu calls the unit ssh (sshd is an alias that is missing under socket activation), Amazon Linux sshd.
    for unit in ssh sshd; do
        if systemctl is-active --quiet $unit.socket; then
            # The next connection starts a sshd with the new key. A reload would not: Debian's sshd cannot bind its
            # address again then, and ends, and the reload may wait for it for 90 s, in which no sshd starts. Open
            # connections stay (KillMode=process).
            systemctl stop $unit.service || :
            break
        elif systemctl is-active --quiet $unit; then
            # A reload (SIGHUP), not a restart: open connections stay whatever the unit's KillMode is. A failure is no
            # error: the laptop connects again and checks the key.
            systemctl reload $unit || :
            break
        fi
    done
    ;;
*)
    echo "unknown step: $1" >&2
    exit 2
    ;;
esac
