"""How it is started: the command line and the local launcher."""
