"""Windows, lanes, and the loop that reveals them."""
