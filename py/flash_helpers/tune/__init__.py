"""The search for the fastest configs of a GPU."""
