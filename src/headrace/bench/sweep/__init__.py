"""The highest rate that holds the SLO."""
