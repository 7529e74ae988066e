"""The watcher: what happened before what, races, poison and lints."""
