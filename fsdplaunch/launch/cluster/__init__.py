"""Past one machine: how machines find each other, and how a cluster's own scheduler starts them. Free of torch."""
