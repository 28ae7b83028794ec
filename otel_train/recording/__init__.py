"""What a rank writes and an agent reads: events, rings, and the memory that both share."""
