"""Metrics: `metrics` measures at the front end, `replicas` shows what the engines count."""
