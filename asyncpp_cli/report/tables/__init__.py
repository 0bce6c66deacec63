"""Tables and documents before they are written in a format."""
