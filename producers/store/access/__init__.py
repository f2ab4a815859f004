"""Who may ask a gateway: API keys, kept hashed; and the log of who changed keys, endpoints and models' versions."""
