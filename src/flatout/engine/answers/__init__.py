"""Tools that check whether a step is correct, and list the rows that it trains on."""
