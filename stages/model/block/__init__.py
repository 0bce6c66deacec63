"""Running a block: plain, recomputed or compiled."""
