"""Where the ranks of a run meet: a server in rank 0's process, its clients, and what goes through it."""
