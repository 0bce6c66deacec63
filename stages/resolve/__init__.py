"""From a run's configuration to its facts, or to what is wrong with it. Imports no torch."""
