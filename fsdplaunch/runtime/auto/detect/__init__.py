"""Whether, when and which models of an unmodified script are sharded."""
