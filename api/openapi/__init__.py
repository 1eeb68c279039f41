"""The description of the HTTP API (OpenAPI 3.1), made of what the code parses and writes."""
