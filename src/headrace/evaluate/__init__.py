"""Judging what a model says: prompt sets, and gates that decide by them."""
