"""How much memory a training run needs on each GPU and host, before it holds any."""
