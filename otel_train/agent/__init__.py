"""The agent process: reads recorded events, aggregates and exports them."""
