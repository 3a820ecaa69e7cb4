"""Adapters that put a memory under real models, without a change to their code."""
