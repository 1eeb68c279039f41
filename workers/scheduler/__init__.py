"""Who runs next: pure state, no model, no network."""
