"""Commands that make, run, continue and remove runs."""
