"""The one list of configuration keys: what each is called, may hold and means."""
