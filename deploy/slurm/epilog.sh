#!/bin/bash
# Epilog: end the Collector of a job, which sends what it holds; keep its queue when it could not.
set -u
exec >>"${OTELCOL_PROLOG_LOG:-/var/log/otel-train-prolog.log}" 2>&1 </dev/null

state=${OTELCOL_STATE:-/var/spool/otel-train}/${SLURM_JOB_ID:?called by slurmd}
pid=$(cat "$state/pid" 2>/dev/null) || exit 0

kill -TERM "$pid" 2>/dev/null
for _ in {1..100}; do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
done
kill -KILL "$pid" 2>/dev/null
rm -f "$state/pid" "$state/endpoint"
exit 0
