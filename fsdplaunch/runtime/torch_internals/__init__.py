"""The private names of torch that this package uses, each behind a plain name. Nothing else here touches one.

A private name may change with any version of torch. Each entry says in which versions it was seen with the meaning
it has here, and what it gives on versions that lack it. "All" is 2.9 to 2.15, the range that is tested.

One module a subject, imported by its own name: the agent process needs `elastic`, and must not import FSDP for it.
"""
