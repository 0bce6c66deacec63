"""What a person types. Starts without importing torch, submitit or polars: commands import what they need."""
