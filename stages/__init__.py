"""What runs in the process of one pipeline stage."""
