"""Configuration: one strict YAML, environment and flags become one frozen object."""
