"""Data sets of the command line, and the order of their samples."""
