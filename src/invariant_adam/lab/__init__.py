"""The laboratory behind the command line: checks of the theory and training runs that show the claim."""
