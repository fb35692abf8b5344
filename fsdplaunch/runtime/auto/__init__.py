"""Train scripts that are written for one process, unchanged: the hooks that shard their models for them.

Importing this package or any module of it changes nothing; `install.hooks` does, for as long as its context lasts.
Each hook stands in a file of its own, with the reason why it is needed.
"""
