"""Commands about what fits, about data, and about this machine."""
