"""OpenAI's endpoints for text. Each request becomes one or more tasks whose caller waits for them.

    chat, completions, responses: body -> parameters (known, offered, within limits) -> text -> token ids -> Task
    Foreground (gateway.tasks): submit all, events as they come; tasks are cancelled when the caller leaves
    events -> answer: outputs by choice -> chunks as they come -> usage -> [DONE]
                                           -> complete: JSON by choice, few large at once
    tools: functions that a model may call -> grammar -> tool_call_parser: content and calls in an output

    pooling: texts -> one task -> its terminal entry, which has a vector, labels' probabilities or a score for each text

OpenAI's parameters keep their names. Unsupported ones are refused by name.
"""
