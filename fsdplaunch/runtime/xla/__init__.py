"""PyTorch/XLA: the same doors as FSDP1 and FSDP2, behind them torch_xla. Imported only in runs that use it."""
