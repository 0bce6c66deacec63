"""Turns text files into token shards for training."""
