"""Data sets that the command line trains on, and the order in which they are visited."""
