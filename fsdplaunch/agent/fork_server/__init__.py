"""The process that workers are forked from: its handle in the agent, its own side, and what a fork becomes."""
