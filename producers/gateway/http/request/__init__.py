"""A request's parts, read and checked: its JSON body, the fields of that, its query."""
