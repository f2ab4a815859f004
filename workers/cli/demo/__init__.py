"""`penstock demo`: command starts a system, load submits to it and follows the tokens, report sums it up."""
