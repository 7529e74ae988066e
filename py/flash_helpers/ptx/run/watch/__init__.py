"""The watcher: the order of events, races, poison and lints."""
