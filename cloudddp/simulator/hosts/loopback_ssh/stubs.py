"""Stubs on a loopback node's PATH for commands that need a machine of their own.

They answer queries about GPUs, the deadline's timer and cloud-init as the instance would, and refuse whatever
would change the machine: a loopback node shares it with the user.
"""

from __future__ import annotations

import shlex
import sys

from cloudddp.simulator.guest import devices, docker, services
from cloudddp.simulator.hosts.node_spec import UserData

_REFUSED = ("poweroff", "shutdown", "reboot", "halt", "exportfs", "mount.nfs4", "mount.lustre")

_NFS = ("exportfs", "mount.nfs4")
_REFUSAL = """#!/bin/sh
echo "simulated node: $(basename "$0") is refused: the node shares this computer" >&2
exit 1
"""

# `sudo` allows only the two steps of infra/node/host-key.sh, applied to the host key of the node's server, a
# new deadline (the scripts would change this computer's /etc), and shared folders, which are links here.
_SUDO = r"""#!/bin/sh
cd "$(dirname "$0")/../run" || exit 1
same() { [ "$(cut -d ' ' -f 1,2 "$1")" = "$2" ]; }
case "$1 $2 $3 $4 $5" in
"-n sh -s -- make-host-key")
    cat > /dev/null
    if [ -e fresh_host_key ]; then cut -d ' ' -f 1,2 fresh_host_key.pub; else cut -d ' ' -f 1,2 host_key.pub; fi
    ;;
"-n sh -s -- install-host-key")
    cat > /dev/null
    if [ -e fresh_host_key ] && same fresh_host_key.pub "$6"; then
        cp fresh_host_key.pub host_key.pub
        mv fresh_host_key host_key
    fi
    same host_key.pub "$6" || exit 1
    echo > reload
    ;;
"-n sh -s -- move-deadline")
    cat > /dev/null
    date -u -d "@$6" '+%a %Y-%m-%d %H:%M:%S UTC' > deadline.new && mv deadline.new deadline
    ;;
"-n sh -s -- share-folder")
    cat > /dev/null
    folder=${6#\"}
    ln -sfn "${folder%%\"*}" exported-by-@ADDRESS@
    ;;
"-n timeout --signal=KILL 60 mount")
    shift 3
    if ! exported=$(readlink ../../*/run/exported-by-"${7%%:*}"); then
        echo "mount.nfs4: access denied by server while mounting $7" >&2
        exit 32
    fi
    rmdir "$8" && ln -s "$exported" "$8"
    echo "simulated node: a link stands in for the network file system"
    ;;
"-n umount --lazy "*)
    rm "$4"
    ;;
"-n apt-get -qq update "*) ;;
"-n apt-get -qq install --no-install-recommends")
    shift 5
    for package in "$@"; do
        case $package in
        nfs-kernel-server) mv ../bin/not-installed-exportfs ../bin/exportfs ;;
        nfs-common) mv ../bin/not-installed-mount.nfs4 ../bin/mount.nfs4 ;;
        *) echo "E: Unable to locate package $package" >&2; exit 100 ;;
        esac
    done
    ;;
*)
    echo "simulated node: sudo is refused: the node shares this computer" >&2
    exit 1
    ;;
esac
"""  # noqa: E501

_FINDMNT = """#!/bin/sh
find "$HOME/cloudddp-shared" -maxdepth 1 -type l 2> /dev/null
"""

_CLOUD_INIT = """#!/bin/sh
[ "$1" = status ] && { echo "status: done"; exit 0; }
echo "simulated node: cloud-init supports only status" >&2
exit 1
"""

_NO_GPU = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver (simulated node: no GPU)."
exit 9
"""

_GPUS = """#!/bin/sh
case "$1" in
-L | --list-gpus) cat <<'LIST'
{list}
LIST
    exit {code}
    ;;
*)
    echo "simulated node: nvidia-smi supports only -L" >&2
    exit 1
    ;;
esac
"""

_DOCKER = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} -IS {shlex.quote(docker.__file__)} "$@"
"""

_NO_EFA = """#!/bin/sh
echo "fi_getinfo: -61 (No data available)"
exit 61
"""

_EFA = """#!/bin/sh
case "$*" in
"-p efa -t FI_EP_RDM") cat <<'LIST'
{list}
LIST
    ;;
*)
    echo "simulated node: fi_info supports only -p efa -t FI_EP_RDM" >&2
    exit 1
    ;;
esac
"""

# For an unknown unit, as systemd 255 does: `show` succeeds, `is-active` exits with 3, `is-enabled` with 4.
_SYSTEMCTL = r"""#!/bin/sh
timer={timer}
verb= unit= props= value=no
while [ $# -gt 0 ]; do
    case "$1" in
    --value) value=yes ;;
    -P) shift; props="$props,$1"; value=yes ;;
    -p | --property) shift; props="$props,$1" ;;
    -p*) props="$props,${{1#-p}}" ;;
    --property=*) props="$props,${{1#--property=}}" ;;
    -q | --quiet | --no-pager | --no-legend | --plain | --all | -a) ;;
    -*) verb=unknown ;;
    *) if [ -z "$verb" ]; then verb=$1; else unit=$1; fi ;;
    esac
    shift
done
elapse={elapse} active=inactive sub=dead load=not-found enabled= next= known=no
moved=$(dirname "$0")/../run/deadline
[ ! -e "$moved" ] || elapse=$(cat "$moved")
if [ -n "$timer" ] && [ "$unit" = "$timer" ]; then
    active=active sub=waiting load=loaded enabled=enabled next=$elapse known=yes
fi
case "$verb" in
is-active) echo $active; [ $known = yes ] || exit 3 ;;
is-enabled) echo ${{enabled:-not-found}}; [ $known = yes ] || exit 4 ;;
show)
    [ -n "$props" ] || props=Id,LoadState,ActiveState,SubState,UnitFileState,Result,NextElapseUSecRealtime
    for name in $(echo "$props" | tr , ' '); do
        case "$name" in
        ActiveState) answer=$active ;;
        SubState) answer=$sub ;;
        LoadState) answer=$load ;;
        UnitFileState) answer=$enabled ;;
        Result) answer=success ;;
        Id) answer=$unit ;;
        NextElapseUSecRealtime) answer=$next ;;
        *) continue ;;
        esac
        if [ "$value" = yes ]; then echo "$answer"; else echo "$name=$answer"; fi
    done
    ;;
list-timers)
    echo "NEXT UNIT"
    if [ -n "$timer" ]; then echo "$elapse" "$timer"; fi
    ;;
*)
    echo "simulated node: unsupported: systemctl $verb" >&2
    exit 1
    ;;
esac
"""


def scripts(
    *,
    gpus: tuple[str, ...],
    efa_devices: int,
    user_data: UserData,
    address: str,
    failed_gpus: int = 0,
    nfs: bool = True,
) -> dict[str, str]:
    """Return name and text of each command, for a node with these GPUs, of which the last have failed, EFA
    devices and address; where `nfs` is False, NFS has to be installed first."""
    elapse = services.systemd_time(user_data.deadline.timestamp()) if user_data.deadline else ""
    systemctl = _SYSTEMCTL.format(timer=shlex.quote(user_data.timer), elapse=shlex.quote(elapse))
    good = len(gpus) - min(failed_gpus, len(gpus))
    listed = [f"GPU {index}: {name} (simulated)" for index, name in enumerate(gpus[:good])]
    listed += [devices.LOST.format(f"00000000:{index:02X}:00.0") for index in range(good, len(gpus))]
    code = devices.LOST_CODE if good < len(gpus) else 0
    domains = "\n".join(
        f"provider: efa\n    fabric: efa\n    domain: rdmap{16 + index}s27-rdm\n    type: FI_EP_RDM"
        for index in range(efa_devices)
    )
    refused = [name if nfs or name not in _NFS else f"not-installed-{name}" for name in _REFUSED]
    return {
        **dict.fromkeys(refused, _REFUSAL),
        **({} if nfs else {"apt-get": _REFUSAL}),
        "cloud-init": _CLOUD_INIT,
        "sudo": _SUDO.replace("@ADDRESS@", address),
        "findmnt": _FINDMNT,
        "nvidia-smi": _GPUS.format(list="\n".join(listed), code=code) if gpus else _NO_GPU,
        "fi_info": _EFA.format(list=domains) if efa_devices else _NO_EFA,
        "systemctl": systemctl,
        "docker": _DOCKER,
    }
