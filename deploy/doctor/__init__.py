"""`tokenmill doctor`: looks at everything that the server needs, and changes nothing."""
