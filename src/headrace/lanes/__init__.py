"""Lanes: what class of traffic a request belongs to."""
