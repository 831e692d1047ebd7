"""Admission: accept a request, hold it at the door, or shed it."""
