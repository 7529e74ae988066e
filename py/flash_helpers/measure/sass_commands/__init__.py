"""The commands of `python -m flash_helpers.sass`, which tools/ has as programs, too."""
