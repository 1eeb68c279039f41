"""The routes: parse, submit, respond."""
