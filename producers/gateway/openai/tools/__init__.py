"""Tools: functions that a model may call, in chat completions.

asked: the request's tools, checked; formats: the ways in which models write calls, told by their chat templates
grammar: what the output may be, so that each call is of a function's schema
spoken: an output's text as content and calls, piece by piece
"""
