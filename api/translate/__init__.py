"""Between OpenAI's wire and the domain, one module for each endpoint."""
