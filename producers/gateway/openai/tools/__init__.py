"""Tools: functions that a model may call, in chat completions.

request: the request's tools, checked
grammar: the formats in which models write calls, and what the output may be, so that each call follows a schema
tool_call_parser: an output's text as content and calls, piece by piece, for messages and streams
"""
