"""Batches over HTTP, and what their lines ask of the endpoints.

endpoints makes tasks of lines' bodies and answers of their ends, for the sweeper that expands and finishes batches
"""
