"""The index of a sharded checkpoint of torch's (DCP): the file that says what its data files hold."""

INDEX_NAME = ".metadata"
MAX_INDEX_BYTES = 256 * 2**20
"""Largest index that is read: room for a million chunks of tensors."""
