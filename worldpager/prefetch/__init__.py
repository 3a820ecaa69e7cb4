"""Poses and their extrapolation, retrieval, what to load ahead, and what to serve on a miss."""
