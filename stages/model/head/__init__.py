"""The head: its loss, in chunks and in shards over the ranks."""
