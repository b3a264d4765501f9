"""What the server tells monitoring: metrics for Prometheus, traces for OpenTelemetry."""
