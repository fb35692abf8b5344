"""`torch.save`, `load_state_dict` and their relatives, for sharded models."""
