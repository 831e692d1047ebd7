"""Whether two runs differ beyond noise."""
