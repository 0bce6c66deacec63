"""What a layout costs before anything runs: memory, step time and bubble. Imports no torch."""
