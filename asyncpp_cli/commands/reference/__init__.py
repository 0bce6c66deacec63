"""Commands that show what templates, schedules and optimizers there are."""
