"""From the user's model to the sharded one: units, mesh, weights, optimizer."""
