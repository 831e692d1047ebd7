"""Step policies of other engines, with their defaults, so that a comparison is like against like."""
