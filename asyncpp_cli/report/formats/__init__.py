"""The formats in which a report is written."""
