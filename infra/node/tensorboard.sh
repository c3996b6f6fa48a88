# Runs TensorBoard on this node for as long as the laptop is connected:
#
#   sh -s -- PYTHON LOGDIR-BELOW-HOME < tensorboard.sh
#
# Writes a line a second, with its port once it listens (on the loopback): a line that cannot be written means that the
# laptop has gone. Where PYTHON has no TensorBoard, pip installs it into a folder of its own. Otherwise it exits with 1, and
# the reason as the last line on stderr.
python=${1:-python3}
logdir=$HOME/$2
own=$HOME/.cloudddp/tools/tensorboard

has_it() {
    "$python" -c 'import tensorboard.main' > "$work/log" 2>&1
}

install_it() {
    echo "installing TensorBoard on the node" >&2
    # Older versions of TensorBoard import pkg_resources, which setuptools 81 was the last one to have.
    timeout 240 "$python" -m pip install --quiet --disable-pip-version-check --no-input --upgrade \
        --target "$own" tensorboard 'setuptools<81' > "$work/log" 2>&1 && has_it
}

end_it() {
    trap '' HUP INT TERM
    rm -rf "$work" # first: this shell may be killed, too
    [ -z "$pid" ] || { kill -s TERM -- "-$pid" && sleep 1 && kill -s KILL -- "-$pid"; } 2> /dev/null
}

main() {
    exec < /dev/null
    umask 077
    cd / || exit 1 # Python would import what has the name of a module from the project
    pid=
    work=$(mktemp -d) || exit 1
    trap end_it EXIT
    trap 'exit 1' HUP INT TERM
    trap '' PIPE
    if ! has_it; then
        export PYTHONPATH="$own"
        if ! has_it && ! install_it; then
            tail -n 1 "$work/log" >&2
            exit 1
        fi
    fi
    setsid "$python" -m tensorboard.main --logdir "$logdir" --host 127.0.0.1 --port 0 > "$work/log" 2>&1 &
    pid=$!
    port=
    while kill -0 "$pid" 2> /dev/null; do
        [ -n "$port" ] || port=$(sed -n 's!^TensorBoard .* at http://127\.0\.0\.1:\([0-9]\{1,5\}\)/.*!\1!p' "$work/log")
        echo "$port" 2> /dev/null || exit 1
        sleep 1
    done
    tail -n 1 "$work/log" >&2
    exit 1
}

main
