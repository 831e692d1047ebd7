"""headrace: an SLO-first LLM serving system.

The packages below are named after the stations on a request's path; see ``docs/ARCHITECTURE.md``.
"""

__version__ = "0.1.0"
