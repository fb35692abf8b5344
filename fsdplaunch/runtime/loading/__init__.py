"""Pretrained weights from files straight into the shards of each rank."""
