"""Attention over paged memory: over chosen blocks only, and over int4 blocks as they are stored."""
