"""OpenAI's `/v1/files`: uploads, and what batches wrote. Their bytes are blobs, what is known of them is in the store.

    body -> multipart (a part's bytes as they come) -> upload (pieces -> a blob that nobody sees) -> commit, FILE_MADE
    GET .../content -> content (ranges, piece by piece)

No file is in memory: a gateway holds a piece of each one that it receives or sends.
"""
