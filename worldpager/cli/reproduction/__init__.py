"""Published tables and figures that need no weights: one file each, and what they share."""
