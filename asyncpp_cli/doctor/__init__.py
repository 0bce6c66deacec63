"""Checks of this machine and of a cluster, with advice on what to change."""
