"""`fsdplaunch tune`: what is asked, the search, how it is shown, what it leaves behind."""
