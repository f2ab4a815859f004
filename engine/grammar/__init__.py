"""Outputs of a given form: JSON of a schema, texts of a regular expression or of a Lark grammar. No torch.

schema: a caller's JSON schema as one whose outputs end (keywords: those of one schema by itself); who takes a task in
asks it, and the record keeps the result
source: a form as a grammar of llguidance, and whether that can be followed at all
trial: asks that in a child process, which can be ended (child: what runs there); gateways ask it, too
matcher: follows one output token by token, and tells which tokens may come next

llguidance (https://github.com/guidance-ai/llguidance) parses grammars and computes masks. It comes with the extras
`worker` and `gateway`; an engine without it refuses requests that ask for a form.
"""
