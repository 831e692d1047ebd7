"""Percentiles, intervals, and tests, without distributions assumed."""
