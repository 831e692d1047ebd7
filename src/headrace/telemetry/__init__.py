"""Telemetry: what happened, as metrics and as one log line per request."""
