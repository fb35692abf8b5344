"""From a Config, or from a file's text, to the text of a file."""
