"""The scaling policy: rules (settings), signals (the present) and memory (the past) in, a decision out; nothing else.

signals, rules, memory ─▶ decide ─▶ decision, memory ─▶ JSON ─▶ restored ─▶ signals, memory
"""
