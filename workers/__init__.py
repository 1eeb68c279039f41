"""The worker: one process, one model, many requests at once."""
