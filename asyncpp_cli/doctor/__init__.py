"""Is this machine, or this cluster, fit for it? And if not: what to change."""
