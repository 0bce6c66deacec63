"""Tuning: settings to try, their budget by successive halving, and what the runs say of them."""
