"""Access to a gateway: API keys, kept hashed; the audit log of changes of keys, endpoints and models' versions."""
