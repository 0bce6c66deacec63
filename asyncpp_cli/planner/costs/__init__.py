"""Times of the parts of a model: by the data of a device, or as measured."""
