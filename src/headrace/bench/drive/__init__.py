"""Sending a schedule and timing what comes back."""
