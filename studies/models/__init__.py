"""Models of the command line, as lists of pipeline stages."""
