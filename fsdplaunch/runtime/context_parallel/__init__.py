"""Split sequences over ranks inside of a model's blocks, with attention over all of them."""
