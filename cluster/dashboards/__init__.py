"""The Grafana dashboards, made from the list of metrics; see `headwater dashboards`."""
