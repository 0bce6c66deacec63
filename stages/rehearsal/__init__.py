"""One rank of a run at its real size with fake tensors: types, devices, shapes, memory and FLOPs."""
