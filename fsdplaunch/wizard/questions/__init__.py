"""What the wizard asks: one module per group of questions."""
