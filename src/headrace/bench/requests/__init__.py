"""The bytes of requests: texts of a wanted number of tokens, bodies, illegal requests."""
