"""Summaries for people and for other tools: terminal, HTML, CSV, vLLM's JSON."""
