"""Engines over HTTP: any OpenAI-compatible server behind the one seam for engines."""
