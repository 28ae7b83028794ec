#!/bin/bash
# Prolog: start a Collector on a node of a job, as the job's user, before its first task.
#
# slurm.conf: Prolog=/etc/slurm/otel-train/prolog.sh  Epilog=/etc/slurm/otel-train/epilog.sh  PrologFlags=Alloc
#             TaskProlog=/etc/slurm/otel-train/task_prolog.sh
#
# Several jobs on a node have a Collector each, on ports of its own: three from OTELCOL_FIRST_PORT on that are free.
# The address is in STATE/JOB/endpoint, and task_prolog.sh tells the tasks.
# A prolog that fails drains the node, so this one never does: without a Collector the ranks spool into their run
# directories, and nothing is lost.
set -u
exec >>"${OTELCOL_PROLOG_LOG:-/var/log/otel-train-prolog.log}" 2>&1 </dev/null

program=${OTELCOL:-/usr/local/bin/otelcol-contrib}
config=${OTELCOL_CONFIG:-/etc/slurm/otel-train/collector.yaml}
root=${OTELCOL_STATE:-/var/spool/otel-train}
state=$root/${SLURM_JOB_ID:?called by slurmd}
first=${OTELCOL_FIRST_PORT:-24318}
jobs=128 # on a node at a time

say() { echo "$(date +%FT%T) job $SLURM_JOB_ID: $*"; }
listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

if [ ! -x "$program" ] || [ ! -r "$config" ]; then
    say "no $program or no $config: no Collector on this node"
    exit 0
fi
# The queue alone is the user's: what root writes and reads, and the pid that the epilog ends, is out of their reach.
mkdir -p "$state/queue" && chown "${SLURM_JOB_UID:-0}:${SLURM_JOB_GID:-${SLURM_JOB_UID:-0}}" "$state/queue" || exit 0
rm -f "$state/endpoint"

user=()
if [ "$(id -u)" = 0 ]; then
    user=(setpriv "--reuid=${SLURM_JOB_UID:?}" "--regid=${SLURM_JOB_GID:-$SLURM_JOB_UID}" --clear-groups --no-new-privs)
fi

# Start it on three ports; whether it listens there.
start() {
    env "COLLECTOR_QUEUE_DIR=$state/queue" "GATEWAY=${GATEWAY:-http://127.0.0.1:14318}" \
        "COLLECTOR_HTTP=127.0.0.1:$1" "COLLECTOR_GRPC=127.0.0.1:$(($1 + 1))" "COLLECTOR_HEALTH=127.0.0.1:$(($1 + 2))" \
        setsid "${user[@]}" "$program" "--config=$config" >"$state/log" 2>&1 9>&- &
    pid=$!
    for _ in {1..100}; do
        kill -0 "$pid" 2>/dev/null || return 1
        listens $(($1 + 2)) && listens "$1" && return 0
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null
    return 1
}

# One prolog at a time chooses, so that two jobs that start together do not choose the same.
exec 9>"$root/.ports"
flock --wait 60 9
for ((i = 0; i < jobs; i++)); do
    port=$((first + 3 * i))
    if listens "$port" || listens $((port + 1)) || listens $((port + 2)); then continue; fi
    start "$port" || break
    echo "$pid" >"$state/pid"
    echo "http://127.0.0.1:$port" >"$state/endpoint"
    say "Collector $pid listens on port $port"
    exit 0
done
say "no Collector on this node: $(tail -n 1 "$state/log" 2>/dev/null || echo "no free port from $first on")"
exit 0
