"""One rank's stages, and the executor that runs the actions of a program on them."""
