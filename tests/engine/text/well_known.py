"""Chat templates of well-known models, written anew from their published prompt formats.

They are not the models' own files, and leave tools out where those have pages about them; they use what those use of
jinja2: trimming in both ways, namespaces, loop controls, slices, methods of strings, tests, macros, dates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """`special`: tokens that the template writes. `words`: SentencePiece's kind of tokenizer, else byte-level."""

    source: str
    bos: str
    eos: str
    special: tuple[str, ...] = ()
    words: bool = False


LLAMA_2 = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system, turns = messages[0]['content'], messages[1:] -%}
{%- else -%}
    {%- set system, turns = none, messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must take turns: user, assistant, user, ...') }}
    {%- endif -%}
    {%- set content = '<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' ~ turn['content'] if loop.first and system is not none
        else turn['content'] -%}
    {%- if turn['role'] == 'user' -%}
        {{ bos_token ~ '[INST] ' ~ content.strip() ~ ' [/INST]' }}
    {%- else -%}
        {{ ' ' ~ content.strip() ~ ' ' ~ eos_token }}
    {%- endif -%}
{%- endfor -%}
"""

LLAMA_3_1 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- set header = '<|start_header_id|>%s<|end_header_id|>\\n\\n' %}
{%- set said = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- header % 'system' }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- said }}
{{- "<|eot_id|>" }}
{%- for turn in turns %}
    {{- header % turn.role + turn.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header % 'assistant' }}
{%- endif %}
"""

MISTRAL_V1 = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}\
{% if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}\
{% else %}{{ raise_exception('only user and assistant are known') }}{% endif %}{% endfor %}"""

MISTRAL_V3 = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn["role"] == "user" %}
        {%- if system is defined and turn == asked[-1] %}
            {{- "[INST] " + system + "\\n\\n" + turn["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + turn["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif turn["role"] == "assistant" %}
        {{- " " + turn["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("only user, assistant and a first system message are known") }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_NEMO = """\
{%- set ns = namespace(system=none, index=0) %}
{%- if messages[0].role == "system" %}{%- set ns.system = messages[0].content %}{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}{%- continue %}{%- endif %}
    {%- if message.role == "user" %}
        {{- "[INST]" }}
        {%- if ns.system is not none and loop.last %}{{- ns.system + "\\n\\n" }}{%- endif %}
        {{- message.content + "[/INST]" }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
"""

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN_2_5 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, made by Alibaba Cloud. You are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}{{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN_3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(open=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and not (message.content.startswith('<tool_response>')
           and message.content.endswith('</tool_response>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content, thought = message.content, '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA_2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model
' }}{% endif %}
"""

GEMMA_3 = """\
{{ bos_token }}
{%- set begin = '' -%}
{%- set turns = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set begin = (messages[0]['content'] if messages[0]['content'] is string
        else messages[0]['content'][0]['text']) + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must take turns') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\\n'
       + (begin if loop.first else '') }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}
            {%- if part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('content must be text or parts') }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

PHI_3 = """\
{% for message in messages %}\
{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}\
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI_4 = """\
{% for message in messages %}\
{% if message['role'] in ('system', 'user') %}\
{{ '<|im_start|>' ~ message['role'] ~ '<|im_sep|>' ~ message['content'] ~ '<|im_end|>' }}\
{% elif message['role'] == 'assistant' %}\
{{ '<|im_start|>assistant<|im_sep|>' }}{% generation %}{{ message['content'] ~ '<|im_end|>' }}{% endgeneration %}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

VICUNA = """\
{%- set ns = namespace(system='A curious user talks with an assistant, who is helpful and polite.') -%}
{%- for message in messages if message.role == 'system' -%}{%- set ns.system = message.content -%}{%- endfor -%}
{{ bos_token ~ ns.system ~ ' ' }}
{%- for message in messages | rejectattr('role', 'equalto', 'system') -%}
    {{ 'USER: ' ~ message.content ~ ' ' if message.role == 'user' else 'ASSISTANT: ' ~ message.content ~ eos_token }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""

DEEPSEEK = """\
{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = false -%}{%- endif -%}
{%- set ns = namespace(system='', first=true) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + message['content'] -%}
        {%- set ns.first = false -%}
    {%- endif -%}
{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{ '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is not none -%}
        {%- set content = message['content'] -%}
        {%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
        {{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}
"""

COMMAND_R = """\
{{ bos_token }}{% macro turn(token, content) -%}
<|START_OF_TURN_TOKEN|>{{ token }}{{ content.strip() }}<|END_OF_TURN_TOKEN|>
{%- endmacro %}
{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}\
{{ turn('<|SYSTEM_TOKEN|>', messages[0]['content']) }}\
{% else %}{% set turns = messages %}{% endif %}
{% for message in turns %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}\
{{ turn('<|USER_TOKEN|>' if message['role'] == 'user' else '<|CHATBOT_TOKEN|>', message['content']) }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

SMOLLM_2 = """\
{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are SmolLM, a helpful assistant by Hugging Face<|im_end|>\\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GRANITE_3 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system, turns = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set turns = messages %}
    {%- set system = "Today's Date: " + strftime_now('%B %d, %Y') + ".\\nYou are Granite, made by IBM." %}
    {%- if thinking %}{%- set system = system + " Think before you answer." %}{%- endif %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- for turn in turns %}
    {{- '<|start_of_role|>' + turn['role'] + '<|end_of_role|>' + turn['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson(indent=None, sort_keys=true) }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

IM = ("<|im_start|>", "<|im_end|>")
KNOWN = {
    "Llama 2": Known(LLAMA_2, "<s>", "</s>", words=True),
    "Llama 3.1": Known(
        LLAMA_3_1, "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "Mistral v0.1": Known(MISTRAL_V1, "<s>", "</s>", words=True),
    "Mistral v0.3": Known(MISTRAL_V3, "<s>", "</s>", ("[INST]", "[/INST]"), words=True),
    "Mistral Nemo": Known(MISTRAL_NEMO, "<s>", "</s>", ("[INST]", "[/INST]")),
    "ChatML": Known(CHATML, "<s>", "<|im_end|>", IM),
    "Qwen 2.5": Known(QWEN_2_5, "", "<|im_end|>", IM),
    "Qwen 3": Known(QWEN_3, "", "<|im_end|>", (*IM, "<think>", "</think>")),
    "Gemma 2": Known(GEMMA_2, "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), words=True),
    "Gemma 3": Known(GEMMA_3, "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), words=True),
    "Phi-3": Known(PHI_3, "<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), words=True),
    "Phi-4": Known(PHI_4, "<|endoftext|>", "<|im_end|>", (*IM, "<|im_sep|>")),
    "Zephyr": Known(ZEPHYR, "<s>", "</s>", words=True),
    "Vicuna": Known(VICUNA, "<s>", "</s>", words=True),
    "DeepSeek": Known(DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")),
    "Command-R": Known(
        COMMAND_R,
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        ("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    "SmolLM 2": Known(SMOLLM_2, "<|im_start|>", "<|im_end|>", IM),
    "Granite 3": Known(GRANITE_3, "<|end_of_text|>", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>")),
}
