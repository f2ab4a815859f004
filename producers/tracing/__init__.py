"""Spans for an OpenTelemetry collector, where `OTEL_TRACES_EXPORTER=otlp` asks for them.

    a request      gateway ─────────────── Span ─▶ Tracer.put ─▶ bounded queue ─▶ a thread ─┐
    a webhook      webhooks process ────── Span ─▶ Tracer.put                               ├▶ OTLP/HTTP
    a task         record, row of the ledger ─ sweeper: task_spans ─▶ Tracer.export ────────┘

A task's spans are made once it has ended, from times that its record has anyway: workers take no part, and what a
killed worker did is in the trace of whoever ended the task. Nothing of OpenTelemetry is imported while it is off.
"""
