"""The HTTP edge: OpenAI-compatible bytes in, tokens out."""
