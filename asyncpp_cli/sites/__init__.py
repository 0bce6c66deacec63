"""Where runs may train: this machine, and profiles of clusters."""
