"""OpenAI's Responses: answers that are kept, stream from any event on, and may run in the background.

    body -> request (parameters) -> conversation (with the response before, cut to fit) -> Task, the record's `response`
    background: submitted, answered at once, read later | foreground: the caller waits, and its leaving cancels
    record + stream -> view: the response's JSON, or its events with their sequence numbers

All state is in the store, so any gateway answers for any response.
"""
