"""The private names of torch that this package uses, each behind a plain name. Nothing else here touches one.

A private name may change with any version of torch. Each entry was seen with the meaning it has here
in all that are tested, 2.9 to 2.15, or says in which, and what it gives on versions that lack it.
"""
