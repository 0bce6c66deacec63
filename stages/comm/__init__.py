"""Communication between the processes of a run; the only user of torch.distributed's communicators."""
