"""OpenAI's `/v1/batches`, and what a batch's lines ask of the endpoints.

routes: body -> request (checked) -> BATCH_CREATE -> views; all else is done by the sweeper
endpoints makes tasks of lines' bodies and answers of their ends, for the sweeper that expands and finishes batches
"""
