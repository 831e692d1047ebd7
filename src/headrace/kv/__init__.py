"""KV memory: what it costs and who uses it."""
