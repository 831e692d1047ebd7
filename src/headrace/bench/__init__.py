"""``headrace bench``: a load generator against any OpenAI-compatible server, and what its records say."""
