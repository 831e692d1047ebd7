"""What records mean: latencies, verdicts, summaries."""
