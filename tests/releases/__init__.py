"""Two releases on one system: this one, and the one before, which is here as a wheel."""
