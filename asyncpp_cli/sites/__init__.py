"""Where runs may train: this machine, profiles of clusters, containers."""
