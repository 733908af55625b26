"""Trains methods side by side on real data: what ``spectrain train`` calls."""
