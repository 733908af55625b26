"""Tools around the engine, each loaded when it is used: models, plans, simulations, commands."""
