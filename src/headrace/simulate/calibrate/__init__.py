"""Measuring step times: of the embedded engine from inside, of any OpenAI-compatible server from outside."""
