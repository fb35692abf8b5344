"""How the nodes of one run find each other, agree, and end together. Free of torch and of schedulers."""
