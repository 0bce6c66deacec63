"""Experiments: from a template to the cells of its matrix and their run folders."""
