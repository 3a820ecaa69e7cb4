"""The command line: one file a command, and what a rollout's report is made of."""
