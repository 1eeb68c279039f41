"""OpenAI's wire: the only home of its field names."""
