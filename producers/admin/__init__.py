"""What operators ask for: dead_letters lists, replays and removes dead letters; tenants shows and weighs tenants."""
