"""What is published or recorded and on no dashboard, and why."""

from __future__ import annotations

from typing import Final

_ALERT: Final = "a window of TrainGoodputBurn alerts; the dashboards show five minutes and an hour"
_CARRIER: Final = "a label of the alerts that a dead Collector mutes; they show it"

NOT_SHOWN: Final = {
    "train_heartbeat_step": "steps behind the first rank are asked of `train_steps_total`, which counts the same in every profile",
    "train_probe_time_seconds": "`otel-train doctor` sends it to see that it arrives; it is of no run",
    "run:train_collector:last1h": _CARRIER,
    "run:train_missing_collector:last1h": _CARRIER,
    "run:train_goodput:ratio30m": _ALERT,
    "run:train_goodput:ratio6h": _ALERT,
}
"""By name in Prometheus."""
