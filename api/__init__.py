"""The HTTP front end: OpenAI's wire on one side, the queue and the event log on the other."""
