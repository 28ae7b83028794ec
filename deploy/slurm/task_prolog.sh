#!/bin/bash
# TaskProlog: tell a task where the Collector of its job listens on this node. Slurm sets what is printed as "export".
# An address that the job has set itself holds.
endpoint=${OTELCOL_STATE:-/var/spool/otel-train}/${SLURM_JOB_ID:?called by slurmstepd}/endpoint
if [ -z "${OTEL_EXPORTER_OTLP_ENDPOINT:-}" ] && [ -r "$endpoint" ]; then
    echo "export OTEL_EXPORTER_OTLP_ENDPOINT=$(<"$endpoint")"
fi
