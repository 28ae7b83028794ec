#!/bin/bash
# Send what runs could not send, from a machine that reaches the stack; for cron on a login node.
#
#   replay.sh RUNS http://127.0.0.1:4318
#
# What was accepted is removed from the spools, so calling it again sends nothing twice. Prometheus takes samples up to
# 24 hours old (out_of_order_time_window): call it every hour. Older data: otel-train replay --blocks.
set -uo pipefail
runs=${1:?usage: replay.sh RUNS ENDPOINT} endpoint=${2:?usage: replay.sh RUNS ENDPOINT}
kept=0
for run in "$runs"/*/; do
    compgen -G "$run/rank*/spool/*.otlp.jsonl" >/dev/null || continue
    otel-train replay "$run" --endpoint "$endpoint" || kept=1
done
exit $kept
