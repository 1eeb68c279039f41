"""The soak: thousands of requests through real processes, of which some are killed all the time."""
