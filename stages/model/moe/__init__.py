"""Blocks of experts: their settings, description, routing and module."""
