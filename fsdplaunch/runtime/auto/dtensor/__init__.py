"""What plain scripts do with sharded parameters, where torch gets it wrong or refuses it."""
