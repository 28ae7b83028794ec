#!/bin/bash
# Prolog: start a Collector on a node of a job, as the job's user, before its first task.
#
# slurm.conf: Prolog=/etc/slurm/otel-train/prolog.sh  Epilog=/etc/slurm/otel-train/epilog.sh  PrologFlags=Alloc
#
# A prolog that fails drains the node, so this one never does: without a Collector the ranks spool into their run
# directories, and nothing is lost.
set -u
exec >>"${OTELCOL_PROLOG_LOG:-/var/log/otel-train-prolog.log}" 2>&1 </dev/null

program=${OTELCOL:-/usr/local/bin/otelcol-contrib}
config=${OTELCOL_CONFIG:-/etc/slurm/otel-train/collector.yaml}
state=${OTELCOL_STATE:-/var/spool/otel-train}/${SLURM_JOB_ID:?called by slurmd}

say() { echo "$(date +%FT%T) job $SLURM_JOB_ID: $*"; }

if [ ! -x "$program" ] || [ ! -r "$config" ]; then
    say "no $program or no $config: no Collector on this node"
    exit 0
fi
mkdir -p "$state" && chown "${SLURM_JOB_UID:-0}:${SLURM_JOB_GID:-${SLURM_JOB_UID:-0}}" "$state" || exit 0

start=(env "COLLECTOR_QUEUE_DIR=$state/queue" "GATEWAY=${GATEWAY:-http://127.0.0.1:14318}" "$program" "--config=$config")
if [ "$(id -u)" = 0 ]; then
    start=(setpriv "--reuid=${SLURM_JOB_UID:?}" "--regid=${SLURM_JOB_GID:-$SLURM_JOB_UID}" --clear-groups --no-new-privs "${start[@]}")
fi
setsid "${start[@]}" >"$state/log" 2>&1 &
echo $! >"$state/pid"
say "Collector $! started"
exit 0
