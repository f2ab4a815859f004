"""`penstock webhooks`: run delivers; ls, show and replay look after deliveries; listen receives them here."""
