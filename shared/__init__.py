"""What the front end and the workers must agree on, and nothing else."""
