"""headrace's load generator and GuideLLM against the same server, in turns. ``docs/bench-agreement.md`` has the
result and the commands."""
