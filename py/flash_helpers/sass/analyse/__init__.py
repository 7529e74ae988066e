"""What the records add up to: counts, phases, bounds, differences."""
