"""Memory of a stage: planned from the configuration, and measured from its tensors."""
