"""The agent: one process per node, which starts, watches and records its workers."""
