"""Every command's options, help and examples; bodies are imported when they run, so that help stays light."""
