"""The model: its description, its cut into stages, and the modules that a stage runs."""
