"""Analyses of the records: counts, phases, bounds, differences."""
