"""Optional measurements of a run (`train.diagnostics`): curvature, and how updates and gradients turn."""
