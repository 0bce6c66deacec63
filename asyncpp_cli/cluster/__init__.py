"""From a cell to processes: what it needs, how its attempts are claimed, started, watched and settled."""
