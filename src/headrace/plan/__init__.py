"""Sizing before anything runs: KV memory of a model, and how many sequences fit."""
