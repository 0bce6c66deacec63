"""The model's shape: parameters, FLOPs, bytes, and how it is cut into stages and shards; no torch."""
