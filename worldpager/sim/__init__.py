"""Predictions before a run: the closed-form model and the geometries it knows."""
