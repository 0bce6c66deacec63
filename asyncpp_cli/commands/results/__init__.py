"""Commands that show, compare and hand on what runs have measured."""
