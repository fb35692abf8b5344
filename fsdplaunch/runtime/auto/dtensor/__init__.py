"""What plain scripts do with sharded parameters, and what torch gets wrong or refuses there."""
