"""Training data: token shards and text on disk, and batches from them."""
