"""The stack: Collector, Prometheus, Alertmanager, a trace store and Grafana, started and stopped."""
