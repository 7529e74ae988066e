"""Exact counts of what a launch did."""
