"""What a person or a program reads about the keys, generated from the schema."""
