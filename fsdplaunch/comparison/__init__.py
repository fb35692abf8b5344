"""`fsdplaunch check --compare`: what one process computes, and what workers compute of the same script."""
